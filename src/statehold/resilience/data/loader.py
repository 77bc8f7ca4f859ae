"""A loader that draws microbatches ahead of time, by their names.

The trainer says which microbatches it expects to compute. Workers draw them in this order, a few
ahead of the trainer. After a change of the shares the trainer says so again: the loader keeps what
is drawn and still expected, and drops the rest. A microbatch that nobody has announced is drawn
before all that has not begun.

Invariants: a batch depends on (step, index) only, and not on the number of workers, or on what
was expected. The loader has no position: the number of the step says what is consumed. The
trainer's generators are left as they are. A draw that differs from an earlier one raises an error
before anybody gets the batch.
Not here: who computes which microbatch (protocol), what a batch is (draws), processes (workers).
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from torch.utils.data import IterableDataset, default_collate

from statehold.errors import DatasetError, UsageError, refused
from statehold.resilience.data.course import Course
from statehold.resilience.data.draws import Draw, Drawn
from statehold.resilience.data.purity import Purity
from statehold.resilience.data.workers import DrawWorkers, Failed, Outcome, Prepare, in_words
from statehold.tensors.kinds.rng import unchanged


class Named(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def index(self) -> int: ...


Name = tuple[int, int]


class Loader:
    """The batches of microbatches, from a data set with numbered samples.

    course: which samples a microbatch has.
    collate_fn: makes a batch of a list of samples, as for torch's DataLoader.
    workers: how many processes draw. With 0, `batch` draws in the trainer.
    prefetch: how many batches for each worker may be drawn or under way ahead of the trainer.
    worker_init_fn: each worker calls it with its number when it starts.
    multiprocessing_context: how workers start; a name such as "forkserver", or a context.
    purity: compares checksums with those of earlier draws.
    """

    def __init__(
        self,
        dataset: Any,
        course: Course,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        workers: int = 0,
        prefetch: int = 2,
        worker_init_fn: Prepare | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        purity: Purity | None = None,
    ) -> None:
        _check(dataset, course, workers, prefetch)
        self._course = course
        self._purity = purity
        self._draw = Draw(dataset, collate_fn, course)
        self._workers: DrawWorkers | None = None
        if workers:
            context = multiprocessing_context
            if not isinstance(context, BaseContext):
                context = multiprocessing.get_context(context)
            self._workers = DrawWorkers(self._draw, workers, worker_init_fn, context)
        self._ahead = workers * prefetch
        self._expected: deque[Name] = deque()
        self._asked: dict[Name, Future[Outcome]] = {}

    def expect(self, microbatches: Iterable[Name]) -> None:
        """Draw these, as (step, index), in this order. Replaces what was expected before."""
        wanted = dict.fromkeys(microbatches)
        for step, index in wanted:
            self._course.check(step, index)
        self._withdraw()
        self._asked = {name: self._asked[name] for name in self._asked if name in wanted}
        self._expected = deque(name for name in wanted if name not in self._asked)
        self._ask()

    def batch(self, microbatch: Named) -> Any:
        """The batch of a microbatch. Waits until it is drawn."""
        name = microbatch.step, microbatch.index
        self._course.check(*name)
        drawn = self._drawn_here(name) if self._workers is None else self._drawn_ahead(name)
        if self._purity is not None:
            self._purity.check(*name, drawn.checksum)
        return drawn.batch

    def close(self) -> None:
        """End the workers. A draw that is under way gets a few seconds, then it is killed."""
        self._expected.clear()
        self._asked.clear()
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drawn_here(self, name: Name) -> Drawn:
        with unchanged():
            try:
                return self._draw(*name)
            except Exception as error:
                raise self._failure(name, in_words(error)) from error

    def _drawn_ahead(self, name: Name) -> Drawn:
        future = self._asked.pop(name, None)
        if future is None or future.cancel():
            self._withdraw()
            if name in self._expected:
                self._expected.remove(name)
            future = self._call(name)
        self._ask()
        outcome = future.result()
        if isinstance(outcome, Failed):
            raise self._failure(name, outcome.error) from _InWorker(outcome.traceback)
        return outcome

    def _ask(self) -> None:
        """Ask the workers for as many as may be drawn ahead."""
        while self._expected and len(self._asked) < self._ahead:
            name = self._expected.popleft()
            self._asked[name] = self._call(name)

    def _withdraw(self) -> None:
        """Expect again what no worker has begun, so that something else goes first."""
        withdrawn = [name for name, future in self._asked.items() if future.cancel()]
        for name in reversed(withdrawn):
            del self._asked[name]
            self._expected.appendleft(name)

    def _call(self, name: Name) -> Future[Outcome]:
        assert self._workers is not None
        return self._workers.call(*name)

    def _failure(self, name: Name, error: str) -> DatasetError:
        step, index = name
        samples = self._course.samples(step, index)
        return DatasetError(
            "a batch could not be drawn",
            step=step,
            index=index,
            samples=samples,
            facts={"error": error},
        )


class _InWorker(Exception):
    """The traceback of an exception in a worker, as a text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _check(dataset: Any, course: Course, workers: int, prefetch: int) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        text = "a loader takes a data set whose samples have numbers"
        hint = "a stream cannot be drawn again from the same place by another replica"
        raise refused(text, "__getitem__", type(dataset).__qualname__, hint)
    if hasattr(dataset, "__len__") and (size := len(dataset)) != course.size:
        raise UsageError(
            "the data set has another number of samples than the training",
            facts={"expected": course.size, "got": size},
        )
    for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1)):
        if type(value) is not int or value < least:
            raise UsageError(f"{name} must be an integer from {least}", facts={"got": repr(value)})
