"""What a study measures, and what it chooses: strategies, one factor at a time around a centre.

Owns: the definition and the name of a strategy, the sizes of a model's tensors, and their places.
The comparisons behind the findings, the order of rounds, and the memory that a study uses. The
figures, their medians, the choice of the settings, and the findings as sentences.
Invariants: every comparison differs in one thing, so a finding has one cause. A full factorial of
the factors would have thousands of cases, so `full` only takes more values of each. The choice is
one setting for saves and restores. It is the setting whose worst share of the best is largest. If
others are as good within the noise, the setting that changes least is taken.
Not here: how a case is run (measure), when (bench), writing the profile (io/profile).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median

from statehold.io.profile import StorageRates
from statehold.options.io import DEFAULTS, Moving
from statehold.units import KiB, MiB, format_bytes

PAGE_BYTES = 4 * KiB


class MovedBy(str, Enum):
    """Who moves the bytes."""

    IO_URING = "io_uring"
    THREADS = "threads"


class Operation(str, Enum):
    """A timed operation. A write is over when it is durable; a restore when all is in memory."""

    FRESH = "fresh"  # new files
    OVERWRITE = "overwrite"  # the same files again, as with the files of retired steps
    COLD = "cold"  # the page cache has nothing of the files
    COLD_NEW = "cold-new"  # into memory that was allocated just now
    WARM = "warm"  # the page cache has all of the files
    WARM_NEW = "warm-new"

    @property
    def is_write(self) -> bool:
        return self in (Operation.FRESH, Operation.OVERWRITE)

    @property
    def is_warm(self) -> bool:
        return self in (Operation.WARM, Operation.WARM_NEW)

    @property
    def into_new_memory(self) -> bool:
        return self in (Operation.COLD_NEW, Operation.WARM_NEW)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to save a state into one file, and to restore it, with direct transfers.

    block_bytes: of the longest transfer. depth: transfers in flight.
    copy_threads: statehold's engine copies the tensors to buffers and checksums them; 0: nothing is
        copied, bytes only move.
    """

    mover: MovedBy = MovedBy.IO_URING
    block_bytes: int = 16 * MiB
    depth: int = 32
    copy_threads: int = 0

    @property
    def is_engine(self) -> bool:
        """Whether statehold saves like this; the others are alternatives."""
        return self.copy_threads > 0

    @property
    def name(self) -> str:
        kind = "statehold" if self.is_engine else "bytes"
        blocks = f"{format_bytes(self.block_bytes)} x {self.depth}"
        copying = f", {self.copy_threads} copying" if self.is_engine else ""
        return f"{kind}, {self.mover.value}, {blocks}{copying}"


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy and its timed operations, in an order in which each finds what it needs."""

    strategy: Strategy
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class State:
    """The sizes of the tensors that are saved."""

    sizes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)


# -- states ----------------------------------------------------------------------------------------

_BYTES_PER_PARAMETER = 2 + 3 * 4  # bf16 weight; fp32 master weight and both moments of Adam
_LAYERS_MIN = 8
_WIDTH = 2.75  # of the inner layer, in model dimensions
_VOCABULARY = 62.5  # in model dimensions


def llama(total_bytes: int) -> State:
    """A Llama-shaped decoder with mixed-precision AdamW, of about that many bytes.

    Nine tensors a layer, and three more. Each has its weight, the master weight, both moments and
    the optimizer's count of steps. So a fifth of the tensors has 4 bytes, and a quarter a few KiB.
    """
    parameters = total_bytes / _BYTES_PER_PARAMETER
    dim = 16
    while _parameters(dim * 2, _LAYERS_MIN) <= parameters:
        dim *= 2
    per_layer = _parameters(dim, 1) - _parameters(dim, 0)
    layers = max(1, round((parameters - _parameters(dim, 0)) / per_layer))
    hidden, vocabulary = int(_WIDTH * dim), int(_VOCABULARY * dim)
    layer = [dim * dim] * 4 + [dim * hidden] * 3 + [dim] * 2
    counts = [vocabulary * dim, *layer * layers, dim, vocabulary * dim]
    weights = [2 * count for count in counts]
    optimizer = [size for count in counts for size in (4 * count, 4 * count, 4 * count, 4)]
    return State(tuple(weights + optimizer))


def _parameters(dim: int, layers: int) -> float:
    return float(dim * dim * (2 * _VOCABULARY + layers * (4 + 3 * _WIDTH)))


def spans_of(state: State, *, aligned: bool) -> list[tuple[int, int]]:
    """The place of each tensor in memory, [begin, end); aligned tensors are padded to whole
    pages."""
    spans, at = [], 0
    for size in state.sizes:
        padded = -(-size // PAGE_BYTES) * PAGE_BYTES if aligned else size
        spans.append((at, at + padded))
        at += padded
    return spans


# -- which are measured ----------------------------------------------------------------------------


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


def pairs(what: str, than: str, a: Strategy, b: Strategy) -> list[Contrast]:
    return [Contrast(what, than, (a, each), (b, each)) for each in JUDGED]


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


# -- the choice ------------------------------------------------------------------------------------
# Pure functions of figures.


# Two settings whose scores differ by less are equally good, however still the storage is.
MARGIN_MIN = 0.03
# Before a figure was measured three times, its spread is unknown.
MARGIN_UNKNOWN = 0.1
SPREADS_MIN = 3
# The chance difference of two medians of n figures: median absolute deviation to standard
# deviation, deviation of one to that of a median, and two of them.
DEVIATIONS = 1.4826 * 1.2533 * 2**0.5
# A figure whose runs lie further apart has moved: it is marked.
MOVED = 1.25
LIKELY = 4
_GB = 1e9


@dataclass
class StudyFigures:
    """GB/s by strategy and operation, one for each time it was measured."""

    rates: dict[Figure, list[float]] = field(default_factory=dict)

    def add(self, strategy: Strategy, rates: dict[Operation, float]) -> None:
        for operation, rate in rates.items():
            self.rates.setdefault((strategy, operation), []).append(rate)

    def of(self, strategy: Strategy, operation: Operation) -> float | None:
        """The median, or None without measurements."""
        found = self.rates.get((strategy, operation))
        return median(found) if found else None

    def moved(self, strategy: Strategy, operation: Operation) -> bool:
        found = self.rates.get((strategy, operation), [1.0])
        return max(found) > MOVED * min(found)

    def strategies(self) -> list[Strategy]:
        return list(dict.fromkeys(strategy for strategy, _ in self.rates))

    def engines(self) -> list[Strategy]:
        """The strategies that a profile can ask for."""
        return [each for each in self.strategies() if each.is_engine]


def best_of(
    figures: StudyFigures, candidates: Iterable[Strategy], operation: Operation
) -> Strategy | None:
    """The candidate with the highest median, or None without measurements."""
    found = [(figures.of(each, operation) or 0.0, i, each) for i, each in enumerate(candidates)]
    top = max(found, key=lambda item: (item[0], -item[1]), default=None)
    return top[2] if top and top[0] > 0 else None


def score(figures: StudyFigures, strategy: Strategy, candidates: Iterable[Strategy]) -> float:
    """The smallest share of the best that a strategy reaches in any operation that counts."""
    pool, shares = list(candidates), []
    for operation in JUDGED:
        best = best_of(figures, pool, operation)
        top = figures.of(best, operation) if best else None
        if top:
            shares.append((figures.of(strategy, operation) or 0.0) / top)
    return min(shares, default=0.0)


def margin(figures: StudyFigures) -> float:
    """Scores that differ by less differ by chance, as the spread of the figures of a study
    shows."""
    found = [
        DEVIATIONS * _deviation(rates) / len(rates) ** 0.5
        for (strategy, operation), rates in figures.rates.items()
        if strategy.is_engine and operation in JUDGED and len(rates) >= SPREADS_MIN
    ]
    return max(MARGIN_MIN, median(found)) if found else MARGIN_UNKNOWN


def _deviation(rates: list[float]) -> float:
    """The median absolute deviation, as a share of the median."""
    middle = median(rates)
    return median(abs(rate - middle) for rate in rates) / middle


def combined(figures: StudyFigures, middle: Strategy, full: bool) -> Strategy:
    """The best value of each setting, as measured around the middle, combined.

    A value that wins by less than the noise stays at the middle's.
    """
    around = [each for each in neighbours(middle, full) if each in figures.engines()]
    best = middle
    for name in ("mover", "block_bytes", "depth", "copy_threads"):
        levels = [each for each in around if _changes(each, middle) <= {name}]
        winner = choose(figures, levels, middle)
        best = replace(best, **{name: getattr(winner, name)})
    return best


def likely(figures: StudyFigures, middle: Strategy, full: bool) -> list[Strategy]:
    """The candidates: the middle, the best of each setting together, and the best so far.

    They are measured more often, because the best of many single figures is the luckiest.
    """
    pool = figures.engines()
    ranked = sorted(pool, key=lambda each: -score(figures, each, pool))
    return list(dict.fromkeys([middle, combined(figures, middle, full), *ranked[:LIKELY]]))


def choose(figures: StudyFigures, candidates: list[Strategy], middle: Strategy) -> Strategy:
    """The settings for the profile, of `candidates`, judged by the best of everything."""
    scores = {each: score(figures, each, figures.engines()) for each in candidates}
    if not scores:
        return middle
    enough = max(scores.values()) - margin(figures)
    good = [each for each in candidates if scores[each] >= enough]
    return min(good, key=lambda each: (len(_changes(each, middle)), -scores[each]))


def _changes(strategy: Strategy, middle: Strategy) -> set[str]:
    names = ("mover", "block_bytes", "depth", "copy_threads")
    return {name for name in names if getattr(strategy, name) != getattr(middle, name)}


def moving_of(strategy: Strategy) -> Moving:
    """The entries of a profile for a strategy of the engine."""
    return Moving(
        buffer_bytes=strategy.block_bytes,
        queue_depth=strategy.depth,
        backend=strategy.mover.value,
        copy_threads=strategy.copy_threads,
    )


def rates_of(figures: StudyFigures) -> StorageRates | None:
    """The rates of the storage: the highest of any strategy, with or without copies and checksums,
    into new files or old ones."""
    write = max(top(figures, Operation.FRESH), top(figures, Operation.OVERWRITE))
    read = top(figures, Operation.COLD)
    return StorageRates(int(write * _GB), int(read * _GB)) if write and read else None


def top(figures: StudyFigures, operation: Operation) -> float:
    """The best rate of all strategies; 0 without measurements."""
    best = best_of(figures, figures.strategies(), operation)
    return (figures.of(best, operation) or 0.0) if best else 0.0


# -- findings --------------------------------------------------------------------------------------


def finding(figures: StudyFigures, same: Iterable[Contrast]) -> str | None:
    """Comparisons of the same two things as one sentence, or None without measurements."""
    parts, what = [], ""
    for each in same:
        a, b = figures.of(*each.a), figures.of(*each.b)
        if a and b:
            moved = figures.moved(*each.a) or figures.moved(*each.b)
            parts.append(f"{each.a[1].value} {a / b:.2f}{'~' * moved} ({a:.2f} / {b:.2f} GB/s)")
            what = f"{each.what}, as a share of {each.than}"
    return f"{what}: {', '.join(parts)}" if parts else None
