"""The measurements: one factor at a time around a centre, then the best of each together.

Owns: the strategies of a study, the comparisons behind its findings, the order of rounds; the
memory that a study saves from and restores into.
Invariants: every comparison differs in one thing, so a finding has one cause. A full factorial of
the factors would have thousands of cases, so `full` only takes more values of each.
Not here: how a case is run (measure), the conclusions from the figures (choose).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from statehold.cli.study.strategies import Case, MovedBy, Operation, Strategy
from statehold.options.io import DEFAULTS
from statehold.units import KiB, MiB

# -- the strategies --------------------------------------------------------------------------------


BLOCKS = (1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB)
DEPTHS = (1, 4, 32, 64)
THREADS = (1, 2, 4)
BLOCKS_FULL = (1 * MiB, 2 * MiB, 4 * MiB, 8 * MiB, 16 * MiB, 32 * MiB, 64 * MiB)
DEPTHS_FULL = (1, 2, 4, 8, 16, 32, 64)
SMALL_BYTES = 256 * KiB  # smaller than any buffer of statehold

FRESH, OVERWRITE, COLD = Operation.FRESH, Operation.OVERWRITE, Operation.COLD
# The operations that count for every strategy.
JUDGED = (FRESH, OVERWRITE, COLD)

Figure = tuple[Strategy, Operation]


@dataclass(frozen=True, slots=True)
class Contrast:
    """Two figures that differ in one thing, called `what` and `than`."""

    what: str
    than: str
    a: Figure
    b: Figure


def centre(copy_threads: int) -> Strategy:
    """How statehold saves without a profile."""
    return Strategy(
        mover=MovedBy.IO_URING,
        block_bytes=DEFAULTS.buffer_bytes,
        depth=DEFAULTS.queue_depth,
        copy_threads=copy_threads,
    )


def bytes_of(strategy: Strategy) -> Strategy:
    """The same transfers, with no copy and no checksum."""
    return replace(strategy, copy_threads=0)


def neighbours(middle: Strategy, full: bool) -> list[Strategy]:
    """`middle` and all strategies that differ from it in one setting."""
    blocks, depths = (BLOCKS_FULL, DEPTHS_FULL) if full else (BLOCKS, DEPTHS)
    found = [middle]
    found += [replace(middle, block_bytes=size) for size in blocks]
    found += [replace(middle, depth=depth) for depth in depths]
    found += [replace(middle, mover=mover) for mover in (MovedBy.IO_URING, MovedBy.THREADS)]
    if middle.is_engine:
        found += [replace(middle, copy_threads=count) for count in THREADS]
    else:
        found.append(replace(middle, block_bytes=SMALL_BYTES))
    return list(dict.fromkeys(found))


def comparisons(middle: Strategy) -> list[Contrast]:
    """The comparisons of the findings, each on a write and, if it matters, on a restore."""
    what, than = "copying and checksumming on the way", "moving bytes only"
    return [
        *_transfers(bytes_of(middle)),
        *in_memory(middle, "a restore of statehold"),
        *pairs(what, than, middle, bytes_of(middle)),
    ]


def pairs(
    what: str, than: str, a: Strategy, b: Strategy, operations: Sequence[Operation] = JUDGED
) -> list[Contrast]:
    return [Contrast(what, than, (a, each), (b, each)) for each in operations]


def _transfers(plain: Strategy) -> list[Contrast]:
    return [
        *pairs("blocks of 256 KiB", "blocks of 16 MiB",
                replace(plain, block_bytes=SMALL_BYTES), plain),
        *pairs("one transfer at a time", f"{plain.depth} at a time", replace(plain, depth=1),
                plain),
        *pairs("pread and pwrite on threads", "io_uring", replace(plain, mover=MovedBy.THREADS),
                plain),
        Contrast("writing new files", "overwriting files", (plain, FRESH), (plain, OVERWRITE)),
    ]  # fmt: skip


def in_memory(strategy: Strategy, how: str) -> list[Contrast]:
    """Restores into memory that has just been allocated, against memory that is there."""
    what, than = f"{how} into memory allocated just now", "into memory that is there already"
    return [
        Contrast(what, than, (strategy, new), (strategy, old))
        for new, old in ((Operation.COLD_NEW, COLD), (Operation.WARM_NEW, Operation.WARM))
    ]


# -- cases -----------------------------------------------------------------------------------------


def strategies(middle: Strategy, full: bool, compared: Iterable[Contrast]) -> list[Figure]:
    """Every figure of the first rounds; those for the choice of a profile come first."""
    judged = [*neighbours(middle, full), *neighbours(bytes_of(middle), full)]
    found = [(strategy, operation) for strategy in judged for operation in JUDGED]
    for each in compared:
        found += [each.a, each.b]
    return list(dict.fromkeys(found))


def cases_of(figures: Iterable[Figure]) -> list[Case]:
    """The cases that give these figures; all begin by writing new files."""
    wanted: dict[Strategy, set[Operation]] = {}
    for strategy, operation in figures:
        wanted.setdefault(strategy, {FRESH}).add(operation)
    return [Case(s, tuple(op for op in Operation if op in ops)) for s, ops in wanted.items()]


def ordered(cases: Sequence[Case], round_index: int) -> list[Case]:
    """There and back, so that a drift in the meantime affects both ends alike."""
    return list(cases) if round_index % 2 == 0 else list(reversed(cases))


# -- memory ----------------------------------------------------------------------------------------


_PATTERN_BYTES = 1 << 20


class MappedMemory:
    """So many bytes at `address`, seen as `view`."""

    def __init__(self, nbytes: int) -> None:
        # Private: shared memory has other, smaller pages, and slower faults.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(1, nbytes), flags=private)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    def prefer_huge_pages(self) -> None:
        self._map.madvise(mmap.MADV_HUGEPAGE)


def kept(nbytes: int) -> MappedMemory:
    """Memory that stays: its pages are touched, and huge if the kernel gives such.

    It has bytes that no storage can take for zeros. Restoring writes the same bytes into it again,
    so it never changes.
    """
    memory = MappedMemory(nbytes)
    with contextlib.suppress(OSError):  # a kernel without them: slower, for all strategies alike
        memory.prefer_huge_pages()
    pattern = os.urandom(_PATTERN_BYTES)
    for at in range(0, nbytes, _PATTERN_BYTES):
        part = memory.view[at : min(nbytes, at + _PATTERN_BYTES)]
        part[:] = pattern[: len(part)]
    return memory


def new(nbytes: int) -> MappedMemory:
    """As an allocator gives it: none of its pages exists yet."""
    return MappedMemory(nbytes)
