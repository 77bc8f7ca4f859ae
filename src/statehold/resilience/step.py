"""Step and Microbatch: what the user's loop sees of a step.

    for microbatch in step:
        microbatch.backward(loss_of(model, batch_of(microbatch.samples)))

Invariants: the gradients are in p.grad after the loop, and only then. A loop that is left early, a
microbatch without a backward pass, or one with a gradient after it, raises UsageError before
anything is summed up.
Not here: which microbatches this replica has (protocol), the sums (sums).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from statehold.errors import UsageError
from statehold.resilience.data.checksums import checksum
from statehold.resilience.data.course import Course
from statehold.resilience.data.purity import Purity
from statehold.resilience.data.seeding import seed_microbatch
from statehold.resilience.driver import Driver
from statehold.resilience.progress import StuckCheck
from statehold.resilience.protocol.actions import Compute
from statehold.resilience.sums.interface import Reported, Sum
from statehold.resilience.sums.norm import Gather, clip_by_norm


@dataclass(frozen=True)
class StepWork:
    """What steps work with."""

    driver: Driver
    sums: Sum
    course: Course
    purity: Purity
    progress: StuckCheck
    params: Sequence[Tensor]
    gather: Gather
    expect: Callable[[], None]  # called when the share may have changed


class Microbatch:
    """One of the microbatches of a step.

    Attributes:
        step: the number of its step. With `index` it is the name of the microbatch.
        index: its place in the step.
        samples: the numbers of its samples, a pure function of the name.
    """

    def __init__(self, work: StepWork, step: int, asked: Compute) -> None:
        self.step = step
        self.index = asked.index
        self.samples = work.course.samples(step, asked.index)
        self._work = work
        self._asked = asked
        self._is_counted = False

    def drew(self, batch: Any) -> None:
        """Say what was drawn for it: tensors, arrays, plain values, and containers of these.

        A Loader does this by itself.

        Raises:
            ImpureSamplesError: another draw of the same microbatch was different.
        """
        self._work.purity.check(self.step, self.index, checksum(batch))

    def backward(self, loss: Tensor, *, report: Tensor | None = None) -> None:
        """Compute the gradients of `loss`, and add them to the step.

        The step's gradient is the mean over all its microbatches. If this raises, nothing of the
        microbatch counts, and it may be called again, with a loss that was computed again.

        Args:
            loss: a scalar: the mean over the samples of this microbatch. It may be scaled.
            report: the loss for `step.losses`, if `loss` is scaled.
        """
        if self._is_counted:
            raise UsageError("backward() was called twice for a microbatch", facts=self._facts)
        work = self._work
        work.driver.check()
        try:
            work.sums.watch(work.driver.start(self._asked), self._asked.copy)
            loss.backward()  # type: ignore[no-untyped-call]
            work.sums.count(self.index, loss if report is None else report)
            self._is_counted = True
        except BaseException:
            self._is_counted = False
            work.driver.failed()
            self.seed()
            raise

    def seed(self) -> None:
        """Begin its random numbers, for the first try and for each other one."""
        seed_microbatch(self._work.course.seed, self.step, self.index)

    def check(self) -> None:
        if not self._is_counted:
            raise UsageError("backward() was not called for a microbatch", facts=self._facts)
        if name := self._work.sums.stray():
            raise UsageError(
                "a gradient was computed after the backward() of its microbatch",
                facts={**self._facts, "parameter": name},
                hint="call backward() once, with the sum of all losses of the microbatch",
            )

    @property
    def _facts(self) -> dict[str, Any]:
        return {"step": self.step, "microbatch": self.index}


class Step:
    """A step: iterate it once, to the end. `number` is final after the loop.

    The number of the step changes during the loop if this replica was taken for dead: it then joins
    again at the step that the others are in. is_over: meanwhile the others have come to the end of
    the run. There is no such step then: it has no losses, no share and no gradients.
    """

    def __init__(self, work: StepWork, until: int) -> None:
        self._work = work
        self._until = until
        self._has_begun = False
        self._number: int | None = None
        self._share: list[int] = []
        self._report: Reported | None = None
        self.is_over = False

    @property
    def number(self) -> int:
        return self._work.driver.number if self._number is None else self._number

    @property
    def losses(self) -> list[float]:
        """The losses of the step's microbatches on all replicas, by index."""
        self.check()
        return list(self._report.losses) if self._report else []

    @property
    def loss(self) -> float:
        """Their mean: the same bits on every replica. NaN if there is no such step."""
        self.check()
        return self._report.mean_loss if self._report else math.nan

    @property
    def share(self) -> list[int]:
        """The microbatches that this replica has contributed. All replicas together have each once.

        A replica that has joined in this step has contributed none.
        """
        self.check()
        return [] if self.is_over else list(self._share)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`.

        Returns the norm before. It has the same bits for any number of replicas and of threads. All
        ranks of a replica have to call it.
        """
        self.check()
        return clip_by_norm(self._work.params, max_norm, self._work.gather)

    def __iter__(self) -> Iterator[Microbatch]:
        if self._has_begun:
            raise UsageError("a step can be iterated once", facts={"step": self.number})
        self._has_begun = True
        work = self._work
        asked = work.driver.step(self._until)
        try:
            while True:
                yield from self._microbatch(next(asked))
        except StopIteration as stop:
            self._number, self._share = stop.value, work.driver.share
            self.is_over = self._number is None
            self._report = None if self.is_over else work.sums.finished
        except BaseException:  # GeneratorExit: an exception in the loop's body, or `break`
            work.driver.part()
            raise

    def _microbatch(self, asked: Compute) -> Iterator[Microbatch]:
        work, number = self._work, self.number
        microbatch = Microbatch(work, number, asked)
        work.expect()
        microbatch.seed()
        work.progress.begin()
        is_computed = False
        try:
            yield microbatch
            microbatch.check()
            is_computed = True
        finally:
            work.progress.end(is_computed=is_computed)

    def check(self) -> None:
        """Raise UsageError if the loop over the step has not come to its end."""
        if self._number is None and not self.is_over:
            raise UsageError(
                "the loop over a step was left before its end",
                facts={"step": self.number, "state": "its gradients are nowhere applied"},
                hint=(
                    "iterate `for microbatch in step` to the end, and then call optimizer.step(). "
                    "After an exception in it, enter steps() again: this replica then joins again"
                ),
            )
