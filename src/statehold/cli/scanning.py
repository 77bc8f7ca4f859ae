"""Every byte of many spans, read at the speed of the device, and the bad pieces.

Owns: batches of spans for the engine, a few of them in flight; the second look at a batch that
failed, piece by piece.
Invariants: memory is the engine's buffers and a few batches, however large the step is. Reading
continues after a bad piece. The page cache of a file is dropped first, so the bytes come from the
device.
Not here: which spans a step has, the meaning of a bad span (checking).

The engine stops a job at its first bad piece. A batch is small, so checking all of a failed batch
again costs little. Asking the engine to continue would put a list of failures into every restore.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import StateholdError
from statehold.io.clients import open_engine
from statehold.io.segments import Segment, start_read
from statehold.layout.ranges import summed_pieces, sums_between
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import ReadJob

BUFFER_BYTES = 16 * MiB
BUFFERS = 24
QUEUE_DEPTH = 32
BATCH_BYTES = 256 * MiB
BATCH_FILES = 64
BATCHES = 3
_WAIT_S = 0.1  # between two looks at the progress, and at an interrupt


@dataclass(frozen=True, slots=True)
class ScannedSpan:
    """The bytes [begin, end) of a file, which belong to one tensor (`name`), or to the header ("").

    `sums` has those of its pieces on the grid of `block_bytes`. The file has at least `end` bytes.
    """

    path: str
    file_bytes: int
    begin: int
    end: int
    sums: str
    block_bytes: int
    name: str
    rank: int

    def pieces(self) -> Iterator[tuple[int, int, str]]:
        """(begin, end, sum) of each piece."""
        return summed_pieces(self.begin, self.end, self.sums, self.block_bytes)

    def part(self, begin: int, end: int) -> ScannedSpan:
        """The part in [begin, end), which must not cut a piece."""
        low, high = max(begin, self.begin), min(end, self.end)
        sums = sums_between(low, high, self.begin, self.sums, self.block_bytes)
        return replace(self, begin=low, end=high, sums=sums)


@dataclass(frozen=True, slots=True)
class BadPiece:
    """A piece that differs from what was committed.

    got: its checksum, or None if it cannot be read; `why` is then the reason.
    """

    span: ScannedSpan
    begin: int
    end: int
    expected: str
    got: str | None
    why: str = ""


def scan(span: ScannedSpan) -> Iterator[BadPiece]:
    """The bad pieces of one span, read one after the other."""
    return (bad for _, bad in scan_bytes(span) if bad is not None)


def scan_bytes(span: ScannedSpan) -> Iterator[tuple[bytes, BadPiece | None]]:
    """The bytes of each piece, and its problem."""
    try:
        fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        for begin, end, expected in span.pieces():
            yield b"", BadPiece(span, begin, end, expected, None, why)
        return
    try:
        for begin, end, expected in span.pieces():
            yield _look(fd, span, begin, end, expected)
    finally:
        os.close(fd)


def _look(
    fd: int, span: ScannedSpan, begin: int, end: int, expected: str
) -> tuple[bytes, BadPiece | None]:
    try:
        data = os.pread(fd, end - begin, begin)  # a regular file is short only at its end
    except OSError as error:
        return b"", BadPiece(span, begin, end, expected, None, os.strerror(error.errno or 0))
    if len(data) < end - begin:
        return data, BadPiece(span, begin, end, expected, None, "the file ends before it")
    got = f"{_core.xxh3_64(data):016x}"
    return data, None if got == expected else BadPiece(span, begin, end, expected, got)


class SpanReader:
    """Reads spans through an engine of its own. Not thread-safe; a context manager."""

    def __init__(self) -> None:
        self._fs = _core.open_fs("auto", QUEUE_DEPTH)
        threads = max(1, min(4, len(os.sched_getaffinity(0))))
        self._engine = open_engine(self._fs, BUFFERS * BUFFER_BYTES, BUFFER_BYTES, threads)
        self._dropped = ""  # the file whose cached pages were dropped last

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._fs.close()

    def bad_pieces(
        self, spans: Iterable[ScannedSpan], done: Callable[[int], None]
    ) -> Iterator[BadPiece]:
        """The bad pieces of `spans`, which are sorted by begin within a file.

        done: gets the number of newly checked bytes, from time to time 0.
        """
        under_way: deque[tuple[list[ScannedSpan], ReadJob | None]] = deque()
        try:
            for batch in _batches(spans):
                under_way.append((batch, self._start(batch)))
                if len(under_way) == BATCHES:
                    yield from self._finish(*under_way.popleft(), done)
            while under_way:
                yield from self._finish(*under_way.popleft(), done)
        finally:
            for _, job in under_way:
                if job is not None:
                    job.cancel()

    def _start(self, batch: list[ScannedSpan]) -> ReadJob | None:
        files = {span.path: span.file_bytes for span in batch}
        numbers = {path: number for number, path in enumerate(files)}
        self._drop_caches(files)
        segments = [
            Segment(numbers[span.path], span.begin, span.end, span.sums, span.name)
            for span in batch
        ]
        try:
            return start_read(self._engine, files, segments, batch[0].block_bytes).job
        except StateholdError:
            return None  # the second look finds the file and the problem

    def _drop_caches(self, paths: Iterable[str]) -> None:
        for path in paths:
            if path == self._dropped:
                continue
            self._dropped = path
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # the read will report it
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _finish(
        self, batch: list[ScannedSpan], job: ReadJob | None, done: Callable[[int], None]
    ) -> Iterator[BadPiece]:
        if not self._is_good(job, done):
            for span in batch:
                yield from scan(span)
                done(0)
        done(sum(span.end - span.begin for span in batch))

    def _is_good(self, job: ReadJob | None, done: Callable[[int], None]) -> bool:
        if job is None:
            return False
        try:
            while not job.wait(_WAIT_S):
                done(0)
            return True
        except (_core.Mismatch, StateholdError):
            return False
        finally:
            job.cancel()


def _batches(spans: Iterable[ScannedSpan]) -> Iterator[list[ScannedSpan]]:
    """Groups of spans for one job each.

    They are cut at the end of a window of BATCH_BYTES of a file, so that the engine's buffers are
    full. Small windows are read together.
    """
    batch: list[ScannedSpan] = []
    size, files = 0, set[str]()
    window: object = None
    for part in (part for span in spans for part in _cut(span)):
        here = part.path, part.begin // BATCH_BYTES
        is_enough = size >= BATCH_BYTES // 2 or len(files) == BATCH_FILES
        if batch and here != window and (is_enough or batch[0].block_bytes != part.block_bytes):
            yield batch
            batch, size, files = [], 0, set()
        window = here
        batch.append(part)
        size += part.end - part.begin
        files.add(part.path)
    if batch:
        yield batch


def _cut(span: ScannedSpan) -> Iterator[ScannedSpan]:
    at = span.begin
    while at < span.end:
        stop = min(span.end, (at // BATCH_BYTES + 1) * BATCH_BYTES)
        yield span.part(at, stop)
        at = stop
