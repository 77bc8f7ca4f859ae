"""What is used here of the engine's jobs: buffers that are lent to Python, and come back.

A save has a job for each file that it writes or proves. Fills is all of them as one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from statehold.tensors.columns import Tensors

Piece = tuple[int, int, int, int]  # segment, offset in it, offset in the buffer, bytes


class Lent(Protocol):
    """A buffer in the hands of Python."""

    @property
    def pieces(self) -> Sequence[Piece]: ...
    @property
    def view(self) -> memoryview: ...


LentT = TypeVar("LentT", bound=Lent)


class Copies(NamedTuple):
    """Copies from a device to the host of memory that is the same there, by addresses."""

    to: array[int]
    source: array[int]
    sizes: array[int]


class CallCopies(Protocol):
    """The engine's call_copies: calls a function of a device's runtime for each copy, without the
    interpreter lock. 0, or the error of the first call that failed."""

    def __call__(
        self,
        function: int,
        *,
        to: array[int],
        source: array[int],
        sizes: array[int],
        kind: int,
        stream: int,
    ) -> int: ...


class FillJob(Protocol[LentT]):
    """The side of the engine's WriteJob that is used here."""

    def next_fills(self, timeout: float | None, most: int) -> Sequence[LentT]: ...
    def filled_all(self, fills: Sequence[LentT]) -> None: ...
    def wait_eager(self, timeout: float | None) -> bool: ...
    @property
    def fills_left(self) -> int: ...


class ReadyJob(Protocol[LentT]):
    """The side of the engine's ReadJob that is used here."""

    def next_readies(self, timeout: float | None, most: int) -> Sequence[LentT]: ...
    def release_all(self, readies: Sequence[LentT]) -> None: ...
    @property
    def ready_left(self) -> int: ...


class JobSource(NamedTuple):
    """The tensors of a job: its segment i + 1 is tensors[i]."""

    job: FillJob[Any]
    tensors: Tensors


class OfOne(NamedTuple):
    """A buffer of one of several jobs. first: the number of its segment 0 among those of all."""

    job: FillJob[Any]
    fill: Any
    first: int

    @property
    def pieces(self) -> Sequence[Piece]:
        first, pieces = self.first, self.fill.pieces
        return [(first + segment, *rest) for segment, *rest in pieces] if first else pieces

    @property
    def view(self) -> memoryview:
        return self.fill.view  # type: ignore[no-any-return]


class Fills:
    """The fills of several jobs, one job after the other, as those of a single job.

    The jobs are in the order in which they were started, in which the engine gives them buffers. So
    no buffer waits here for those of a younger job. The segments of all are counted as one row.
    """

    def __init__(self, sources: Sequence[JobSource]) -> None:
        self._jobs = [job for job, _ in sources]
        counts = [len(tensors) + 1 for _, tensors in sources]
        self._firsts = list(accumulate(counts, initial=0))[:-1]
        self._at = 0  # the job whose fills are handed out now

    def numbered(self, sources: Sequence[JobSource]) -> Iterator[tuple[int, Tensors]]:
        """The tensors of each job, and the number of the first one's segment."""
        for first, (_, tensors) in zip(self._firsts, sources, strict=True):
            yield first + 1, tensors

    def next_fills(self, timeout: float | None, most: int) -> list[OfOne]:
        """The next buffers, those of one job. None: the time is over, or fills_left is 0."""
        while True:
            job = self._jobs[self._at]
            fills = job.next_fills(timeout, most)
            if fills:
                return [OfOne(job, fill, self._firsts[self._at]) for fill in fills]
            if job.fills_left or self._at == len(self._jobs) - 1:
                return []
            self._at += 1

    def filled_all(self, fills: Sequence[OfOne]) -> None:
        """Give buffers back that were handed out together."""
        fills[0].job.filled_all([each.fill for each in fills])

    def wait_eager(self, timeout: float | None) -> bool:
        """Whether the engine has copied every eager byte that it copies itself."""
        return all(job.wait_eager(timeout) for job in self._jobs)

    @property
    def fills_left(self) -> int:
        """Buffers that next_fills has not handed out yet."""
        return sum(job.fills_left for job in self._jobs[self._at :])
