"""Replicas: a training loop whose steps survive the loss of replicas: the public face.

    with Replicas(model, optimizer, microbatches=64, samples=n, batch=8, seed=1) as replicas:
        for step in replicas.steps(until=1000):
            for microbatch in step:
                microbatch.backward(loss_of(model, batch_of(microbatch.samples)))
            optimizer.step(); optimizer.zero_grad()

Owns: what a job has in common, the state of a run, and when it is saved and restored.
Invariants: all members have the same state at the beginning of every step. Only the first member
saves, so a run directory has one writer.
Not here: the protocol (protocol), its execution (driver), the loop over a step (step).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.encoding.strictjson import INT_MAX
from statehold.errors import ClosedError, UsageError, shown
from statehold.net import addresses
from statehold.options.keywords import answering, check_number
from statehold.resilience import identity
from statehold.resilience.checkpoints import Checkpoints
from statehold.resilience.data.course import Course
from statehold.resilience.data.loader import Loader
from statehold.resilience.data.purity import Purity
from statehold.resilience.data.workers import Prepare
from statehold.resilience.driver import Driver
from statehold.resilience.likeness import Likeness
from statehold.resilience.meeting import Desk
from statehold.resilience.position import Position
from statehold.resilience.progress import StuckCheck
from statehold.resilience.protocol.comeback import Comeback
from statehold.resilience.protocol.messages import SECONDS_MAX, TORN, Hello, View
from statehold.resilience.seat import Seat, Surroundings
from statehold.resilience.state_bytes import check_travels
from statehold.resilience.step import Step, StepWork
from statehold.resilience.sums.exact import ExactSum
from statehold.resilience.sums.fast import FastSum
from statehold.resilience.transfer import StateTransfer
from statehold.units import WAIT_S_MAX

ENVIRONMENT = "STATEHOLD_COORDINATOR"
_SUMS: dict[str, type[ExactSum] | type[FastSum]] = {"exact": ExactSum, "fast": FastSum}

logger = logging.getLogger(__name__)


@answering()
class Replicas:
    """One replica of a job, and its rank if it has several.

    Args:
        model: of this rank. It may be sharded over the ranks of the replica (FSDP2, tensor
            parallel).
        optimizer: of this rank.
        microbatches: how many a step has, over all replicas.
        samples: how many the data set has.
        batch: how many samples a microbatch has.
        seed: of the order of the samples and of all random numbers.
        coordinator: "host:port" of `statehold coordinate`. None: STATEHOLD_COORDINATOR says it.
        checkpointer: restores the newest step at the start, and saves after each step that is due.
            All replicas have one, or none has: any of them may become the one that saves.
        reduction: "exact": the same bits for any number of replicas; "fast": floating point,
            overlapped with backward.
        redundancy: how many replicas compute each microbatch. Then redundancy - 1 of them may be
            lost in a step, and nothing is computed again. A step takes that many times as long.
        min_replicas: the replicas wait while there are fewer.
        lease_s: the job takes a rank for dead that has been silent for so many seconds.
        wait_s: how many seconds a replica waits for enough others. Then it saves what it has, and
            raises WaitTimeout.
        stuck_s: the job takes a microbatch for hung that takes longer, in seconds. None: ten times
            the longest one so far, and at least 60 s; an hour for the first one, which may compile.
        state: more of the state, by name: a scheduler, a scaler. It travels to joiners and into
            checkpoints. The names "model", "optimizer" and "replicas" are taken.
        group: spans the ranks of one replica. None: the default process group.

    Raises:
        UsageError: the arguments make no job.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        microbatches: int,
        samples: int,
        batch: int,
        seed: int,
        coordinator: str | None = None,
        checkpointer: Checkpointer | None = None,
        reduction: str = "exact",
        redundancy: int = 1,
        min_replicas: int = 1,
        lease_s: float = 1.0,
        wait_s: float = 600.0,
        stuck_s: float | None = None,
        state: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._course = Course(samples, batch, microbatches, seed)
        self._group = group
        for name, count in (("min_replicas", min_replicas), ("redundancy", redundancy)):
            check_number(name, count, 1, INT_MAX)
        self._min_replicas, self._lease_s = min_replicas, lease_s
        _check_seconds("lease_s", lease_s, 0.05, SECONDS_MAX)
        _check_seconds("wait_s", wait_s, 0.05)
        _check_seconds("stuck_s", 0 if stuck_s is None else stuck_s, 0)
        self._params = list(model.parameters())
        self._sums = _sum_of(reduction)(model.named_parameters(), microbatches)
        self.state: dict[str, Any] = {"model": model, "optimizer": optimizer, **_more(state)}
        check_travels(self.state)
        self._position = Position(self._course, self._sums, self._params, self.state)
        self.state["replicas"] = self._position
        self._checkpoints = Checkpoints(checkpointer, self.state, self._position.tear)
        self._place, self._width = identity.place_in(group)
        address = _address(coordinator)
        host = addresses.reachable_address(address[0])
        self._purity = Purity(self._course)
        self._around = Surroundings(
            address=address,
            microbatches=microbatches,
            redundancy=redundancy,
            wait_s=min(wait_s, WAIT_S_MAX),
            desk=Desk(host),
            host=host,
            device=next((each.device for each in model.parameters()), torch.device("cpu")),
            progress=StuckCheck(stuck_s),
            drawn=self._drawn,
        )
        self._job = {
            **{name: str(count) for name, count in self._course.facts.items()},
            "reduction": reduction,
            "redundancy": str(redundancy),
            "checkpointer": "None" if checkpointer is None else "given",
            "ranks of a replica": str(self._width),
            "parameters": identity.model_digest([model]),
            "optimizer": type(optimizer).__qualname__,
            "code": identity.code_digest(),
        }
        self._transfer = StateTransfer(self.state, host, self._width)
        self._likeness = Likeness(self.state, identity.among(self._width), self._params)
        self._driver: Driver | None = None
        self._comeback = Comeback()
        self._is_closed = self._has_restored = False
        self._loader: Loader | None = None
        self._expected: tuple[int, list[tuple[int, int]]] | None = None

    # -- the loop --------------------------------------------------------------------------

    def steps(self, until: int) -> Iterator[Step]:
        """The steps from the position of the run to `until`, which is not taken any more.

        The first call joins the job: it restores the newest step of the checkpointer, or takes the
        state from live replicas. A later call joins again, and goes on from the step that it has
        come to. A loop that is left by an exception or by `break` leaves the job: the others go on.

        Raises:
            ClosedError: after close().
            ReplicaRefusedError: this replica differs from the job, or its state has come to differ
                from that of other members; the error names what differs.
            UsageError: a microbatch has changed a buffer of the model, the loop over the step
                before was left, or its optimizer.step() has raised.
            ReplicaLostError: this replica is out, and cannot join again by itself.
            WaitTimeout: there were too few replicas for `wait_s` seconds. If this one holds the
                state of the run, the checkpointer has saved it. A new start goes on from there.
        """
        if self._is_closed:
            raise ClosedError("these Replicas were closed", facts={"step": self._position.step})
        if self._driver is not None:
            self._driver.part()  # an iterator of an earlier call may still be there
        driver = self._driver = self._join()
        try:
            yield from self._steps(driver, until)
        except BaseException:  # GeneratorExit: an exception in the loop's body, or `break`
            driver.part()
            raise

    def _steps(self, driver: Driver, until: int) -> Iterator[Step]:
        driver.admit()
        work = StepWork(
            driver=driver,
            sums=self._sums,
            course=self._course,
            purity=self._purity,
            progress=self._around.progress,
            params=self._params,
            gather=self._gather,
            expect=self._expect,
        )
        while driver.number < until:
            step = Step(work, until)
            yield step
            self._end(driver, step)
            if step.is_over:
                break
            if driver.seat.member.is_first:
                self._checkpoints.save(step.number + 1)
            else:
                self._checkpoints.leave_to_others(step.number + 1)
        if driver.seat.member.must_fetch:
            has = "has parts of two steps" if driver.is_torn else "is older"
            logger.warning("statehold: the run has ended without this replica; its state %s", has)
        driver.leave()

    def _end(self, driver: Driver, step: Step) -> None:
        """The loop's body has come to its end: the state is that of the next step."""
        step.check()
        driver.check()
        if self._position.is_torn:
            raise UsageError(
                "optimizer.step() has raised, and the loop goes on",
                facts={"step": step.number, "state": "parts of two steps"},
                hint=(
                    "enter steps() again: this replica then takes the state from the others, or "
                    "the newest step of its checkpointer"
                ),
            )
        if not step.is_over:
            self._position.ended(step.number + 1)
            self._purity.forget(step.number + 1)

    def loader(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        workers: int = 0,
        prefetch: int = 2,
        worker_init_fn: Prepare | None = None,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> Loader:
        """What draws the samples of microbatches ahead of time.

        Make it before the first step, so that its workers do not inherit connections. It does what
        Microbatch.drew does.

        Args:
            dataset: has `__getitem__` and as many samples as the job.
            collate_fn: makes a batch of a list of samples, as for torch's DataLoader.
            workers: how many processes draw. With 0, the trainer draws.
            prefetch: how many batches for each worker may be drawn or under way ahead of the
                trainer.
            worker_init_fn: each worker calls it with its number when it starts.
            multiprocessing_context: how workers start: a name such as "forkserver", or a context.

        Raises:
            UsageError: the data set is a stream, or has another number of samples.
        """
        self._loader = Loader(
            dataset,
            self._course,
            collate_fn=collate_fn,
            workers=workers,
            prefetch=prefetch,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            purity=self._purity,
        )
        return self._loader

    def close(self) -> None:
        """Leave the job: the others go on with the step in progress."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.close()
        self._position.close()
        self._around.desk.close()
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- joining ---------------------------------------------------------------------------

    def _join(self) -> Driver:
        """A state in parts is never taken for that of a step, nor one that misses an update."""
        is_torn = self._position.is_torn
        if self._driver is not None:
            self._driver.rest()
            self._position.go_back()
            is_torn = self._driver.is_torn
        if is_torn or not self._has_restored:
            is_torn = not self._checkpoints.restore() and is_torn
            self._has_restored = True
        return Driver(
            self._take_seat,
            View(TORN) if is_torn else self._view(),
            self._view,
            self._sums,
            self._transfer,
            self._learn,
            self._checkpoints,
            self._position,
            self._comeback,
            self._likeness,
        )

    def _view(self) -> View:
        """Of the live state, which nobody else may have."""
        return View(self._position.step, digest=f"{self._likeness.digest():016x}")

    def _take_seat(self, view: View) -> Seat:
        hello = Hello(
            replica=identity.new_name(self._group, self._width),
            place=self._place,
            width=self._width,
            job=self._job,
            view=view,
            min_replicas=self._min_replicas,
            lease_s=self._lease_s,
            desk=self._around.desk.address,
        )
        return Seat(hello, self._around)

    def _gather(self, mine: float) -> list[float]:
        """The numbers of all ranks of this replica."""
        found: list[Any] = [mine] * self._width
        if self._width > 1:
            dist.all_gather_object(found, mine, group=self._group)
        return found

    def _drawn(self) -> dict[str, int]:
        """What this replica has drawn in the step in progress, for those who take it over."""
        number = 0 if self._driver is None else self._driver.number
        return {f"{number}.{index}": sum for index, sum in self._purity.drawn(number).items()}

    def _learn(self, drawn: Mapping[str, int]) -> None:
        for name, found in drawn.items():
            step, _, index = name.partition(".")
            self._purity.learn(int(step), {int(index): found})

    def _expect(self) -> None:
        """Let the loader draw the rest of this step, and what the next one is likely to have."""
        assert self._driver is not None
        member, step = self._driver.seat.member, self._driver.number
        if self._loader is None or self._expected == (step, member.work):
            return
        self._expected = (step, member.work)
        rest = [each for each in member.work if each not in self._driver.computed]
        following = member.following()
        self._loader.expect([(step, i) for i, _ in rest] + [(step + 1, i) for i in following])


def _sum_of(reduction: str) -> type[ExactSum] | type[FastSum]:
    if reduction not in _SUMS:
        facts = {"expected": " or ".join(map(repr, _SUMS)), "got": shown(reduction)}
        raise UsageError("there is no such reduction", facts=facts)
    return _SUMS[reduction]


def _more(state: Mapping[str, Any] | None) -> Mapping[str, Any]:
    for name in ("model", "optimizer", "replicas"):
        if name in (state or {}):
            raise UsageError(
                "a name in state= is taken",
                facts={"name": name, "got": type((state or {})[name]).__qualname__},
                hint="model and optimizer are in the state already: name what you add otherwise",
            )
    return state or {}


def _check_seconds(name: str, got: object, least: float, most: float = math.inf) -> None:
    if isinstance(got, bool) or not isinstance(got, int | float) or not least <= got <= most:
        raise UsageError(f"{name} must be from {least:g} to {most:g} s", facts={"got": shown(got)})


def _address(coordinator: str | None) -> tuple[str, int]:
    text = coordinator or os.environ.get(ENVIRONMENT, "")
    try:
        return addresses.split(text)
    except ValueError:
        raise UsageError(
            "a job of replicas needs the address of its coordinator",
            facts={"expected": f'"host:port", as coordinator= or in {ENVIRONMENT}', "got": text},
            hint="start one: statehold coordinate --port 29400",
        ) from None
