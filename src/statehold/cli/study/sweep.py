"""The measurements: one factor at a time around a centre, then the best of each together.

Owns: the strategies of a study, the comparisons behind its findings, the order of rounds.
Invariants: pure. A full factorial of the factors would have thousands of cases, so `full` only
takes more values of each. Every comparison differs in one thing, so a finding has one cause.
Not here: how a case is run (measure), the conclusions from the figures (choose).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from statehold.cli.study.strategies import RANK_FILES, Case, Mover, Operation, Strategy
from statehold.options import DEFAULTS
from statehold.units import KiB, MiB

BLOCKS = (1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB)
DEPTHS = (1, 4, 32, 64)
THREADS = (1, 2, 4)
BLOCKS_FULL = (1 * MiB, 2 * MiB, 4 * MiB, 8 * MiB, 16 * MiB, 32 * MiB, 64 * MiB)
DEPTHS_FULL = (1, 2, 4, 8, 16, 32, 64)
SMALL_BYTES = 256 * KiB  # smaller than any buffer of statehold
PYTHON_DEPTH = 8

FRESH, OVERWRITE, COLD = Operation.FRESH, Operation.OVERWRITE, Operation.COLD
# The operations that count for every strategy.
JUDGED = (FRESH, OVERWRITE, COLD)

Figure = tuple[Strategy, Operation]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two figures that differ in one thing, called `what` and `than`."""

    what: str
    than: str
    a: Figure
    b: Figure


def centre(copy_threads: int) -> Strategy:
    """How statehold saves without a profile."""
    return Strategy(
        mover=Mover.IO_URING,
        block_bytes=DEFAULTS.buffer_bytes,
        depth=DEFAULTS.queue_depth,
        copy_threads=copy_threads,
        aligned=False,
    )


def bytes_of(strategy: Strategy) -> Strategy:
    """The same transfers, with no copy and no checksum."""
    return replace(strategy, copy_threads=0, aligned=True)


def neighbours(middle: Strategy, full: bool) -> list[Strategy]:
    """`middle` and all strategies that differ from it in one setting."""
    blocks, depths = (BLOCKS_FULL, DEPTHS_FULL) if full else (BLOCKS, DEPTHS)
    found = [middle]
    found += [replace(middle, block_bytes=size) for size in blocks]
    found += [replace(middle, depth=depth) for depth in depths]
    found += [replace(middle, mover=mover) for mover in (Mover.IO_URING, Mover.THREADS)]
    if middle.is_engine:
        found += [replace(middle, copy_threads=count) for count in THREADS]
    else:
        found.append(replace(middle, block_bytes=SMALL_BYTES))
    return list(dict.fromkeys(found))


# Strategies that statehold does not have, by Python threads: of several ranks, and of one.
RANKS = Strategy(mover=Mover.PYTHON, ranks=RANK_FILES, depth=PYTHON_DEPTH)
ALONE = replace(RANKS, ranks=1)
BUFFERED = replace(RANKS, direct=False)


def comparisons(middle: Strategy) -> list[Comparison]:
    """The comparisons of the findings, each on a write and, if it matters, on a restore."""
    return [
        *_layouts(),
        *_coalescing(),
        *_caching(),
        *_transfers(bytes_of(middle)),
        *_memory(middle),
        *_engine(middle),
    ]


def _pairs(
    what: str, than: str, a: Strategy, b: Strategy, operations: Sequence[Operation] = JUDGED
) -> list[Comparison]:
    return [Comparison(what, than, (a, each), (b, each)) for each in operations]


def _layouts() -> list[Comparison]:
    each, shared = replace(RANKS, layout="tensor"), replace(RANKS, layout="shared")
    return [
        *_pairs("a file for each tensor", "a file for each rank", each, RANKS),
        *_pairs("one shared file", "a file for each rank", shared, RANKS),
        *_pairs("a file for each tensor, buffered", "a file for each rank, buffered",
                replace(each, direct=False), BUFFERED),
        *_pairs("one shared file, buffered", "a file for each rank, buffered",
                replace(shared, direct=False), BUFFERED),
    ]  # fmt: skip


def _coalescing() -> list[Comparison]:
    apart = replace(ALONE, coalesced=False)
    loose = replace(ALONE, direct=False, aligned=False)
    return [
        *_pairs("a transfer for each tensor", "blocks of many tensors", apart, ALONE),
        *_pairs("a transfer for each tensor", "the same for equal tensors",
                apart, replace(apart, state="uniform")),
        *_pairs("a transfer for each tensor, buffered", "blocks of many tensors, buffered",
                replace(loose, coalesced=False), loose),
    ]  # fmt: skip


def _caching() -> list[Comparison]:
    small = replace(RANKS, block_bytes=SMALL_BYTES)
    shown = "direct transfers of 256 KiB"
    return [
        *_pairs(shown, "direct transfers of 16 MiB", small, RANKS),
        *_pairs("buffered transfers of 16 MiB", "direct ones", BUFFERED, RANKS),
        *_pairs("buffered transfers of 256 KiB", shown, replace(small, direct=False), small),
        *_pairs("unaligned tensors, buffered", "aligned ones, buffered",
                replace(ALONE, direct=False, aligned=False), replace(ALONE, direct=False)),
    ]  # fmt: skip


def _transfers(plain: Strategy) -> list[Comparison]:
    return [
        *_pairs("blocks of 256 KiB", "blocks of 16 MiB",
                replace(plain, block_bytes=SMALL_BYTES), plain),
        *_pairs("one transfer at a time", f"{plain.depth} at a time", replace(plain, depth=1),
                plain),
        *_pairs("pread and pwrite on threads", "io_uring", replace(plain, mover=Mover.THREADS),
                plain),
        Comparison("writing new files", "overwriting files", (plain, FRESH), (plain, OVERWRITE)),
    ]  # fmt: skip


def _memory(middle: Strategy) -> list[Comparison]:
    found = []
    for strategy, how in ((middle, "a restore of statehold"), (BUFFERED, "buffered reads")):
        for new, old in ((Operation.COLD_NEW, COLD), (Operation.WARM_NEW, Operation.WARM)):
            what = f"{how} into memory allocated just now"
            than = "into memory that is there already"
            found.append(Comparison(what, than, (strategy, new), (strategy, old)))
    return found


def _engine(middle: Strategy) -> list[Comparison]:
    what, than = "copying and checksumming on the way", "moving bytes only"
    return _pairs(what, than, middle, bytes_of(middle))


# -- cases -----------------------------------------------------------------------------------------


def strategies(middle: Strategy, full: bool) -> list[Figure]:
    """Every figure of the first rounds; those for the choice of a profile come first."""
    judged = [*neighbours(middle, full), *neighbours(bytes_of(middle), full)]
    found = [(strategy, operation) for strategy in judged for operation in JUDGED]
    for each in comparisons(middle):
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
