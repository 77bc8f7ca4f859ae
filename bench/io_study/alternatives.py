"""Strategies that statehold does not have: other files, buffered transfers, single tensors.

Owns: the definition and the name of such a strategy, its files and transfers, and what it is
compared with.
Invariants: pure. The transfers of a strategy cover every byte of the state once. Those of a direct
strategy begin and end on a page. Every comparison differs in one thing, so a finding has one cause.
Not here: moving the bytes (threads).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from statehold.cli.study.strategies import (
    PAGE_BYTES,
    SMALL_BYTES,
    Contrast,
    State,
    Strategy,
    in_memory,
    pairs,
    spans_of,
)
from statehold.units import MiB, format_bytes

RANK_FILES = 4  # of several ranks on one node, and the writers of a shared file
DEPTH = 8


@dataclass(frozen=True, slots=True)
class Alternative(Strategy):
    """One more way to save and restore a state: by pread and pwrite on Python threads.

    layout: "tensor" (a file each), "rank" (a file each), or "shared" (one file, each rank its
        part).
    coalesced: transfers are blocks with whatever tensors lie in them; otherwise no transfer has
        bytes of two tensors.
    aligned: every tensor begins on a page.
    state: "model" or "uniform".
    """

    depth: int = DEPTH
    layout: str = "rank"
    ranks: int = 1
    direct: bool = True
    coalesced: bool = True
    aligned: bool = True
    state: str = "model"

    @property
    def name(self) -> str:
        files = {"tensor": "a file a tensor", "shared": f"one file, {self.ranks} writers"}
        layout = files.get(self.layout, "1 file" if self.ranks == 1 else f"{self.ranks} files")
        words = [
            "bytes",
            "Python threads",
            "direct" if self.direct else "buffered",
            layout,
            f"{format_bytes(self.block_bytes)} x {self.depth}",
        ]
        words += ["not coalesced"] * (not self.coalesced)
        words += ["unaligned"] * (not self.aligned)
        words += ["equal tensors"] * (self.state == "uniform")
        return ", ".join(words)


RANKS = Alternative(ranks=RANK_FILES)
ALONE = Alternative()
BUFFERED = replace(RANKS, direct=False)


def uniform(total_bytes: int) -> State:
    """Equal tensors of 16 MiB, or smaller ones if there would be less than eight."""
    size = min(16 * MiB, max(PAGE_BYTES, total_bytes // 8 // PAGE_BYTES * PAGE_BYTES))
    return State((size,) * max(1, total_bytes // size))


# -- comparisons -----------------------------------------------------------------------------------


def comparisons() -> list[Contrast]:
    """The comparisons of the findings, each on a write and, if it matters, on a restore."""
    return [
        *_layouts(),
        *_coalescing(),
        *_caching(),
        *in_memory(BUFFERED, "buffered reads"),
    ]


def _layouts() -> list[Contrast]:
    each, shared = replace(RANKS, layout="tensor"), replace(RANKS, layout="shared")
    return [
        *pairs("a file for each tensor", "a file for each rank", each, RANKS),
        *pairs("one shared file", "a file for each rank", shared, RANKS),
        *pairs("a file for each tensor, buffered", "a file for each rank, buffered",
                replace(each, direct=False), BUFFERED),
        *pairs("one shared file, buffered", "a file for each rank, buffered",
                replace(shared, direct=False), BUFFERED),
    ]  # fmt: skip


def _coalescing() -> list[Contrast]:
    apart = replace(ALONE, coalesced=False)
    loose = replace(ALONE, direct=False, aligned=False)
    return [
        *pairs("a transfer for each tensor", "blocks of many tensors", apart, ALONE),
        *pairs("a transfer for each tensor", "the same for equal tensors",
                apart, replace(apart, state="uniform")),
        *pairs("a transfer for each tensor, buffered", "blocks of many tensors, buffered",
                replace(loose, coalesced=False), loose),
    ]  # fmt: skip


def _caching() -> list[Contrast]:
    small = replace(RANKS, block_bytes=SMALL_BYTES)
    shown = "direct transfers of 256 KiB"
    return [
        *pairs(shown, "direct transfers of 16 MiB", small, RANKS),
        *pairs("buffered transfers of 16 MiB", "direct ones", BUFFERED, RANKS),
        *pairs("buffered transfers of 256 KiB", shown, replace(small, direct=False), small),
        *pairs("unaligned tensors, buffered", "aligned ones, buffered",
                replace(ALONE, direct=False, aligned=False), replace(ALONE, direct=False)),
    ]  # fmt: skip


# -- files and transfers ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of a file and their place in memory, where the whole state lies in one piece."""

    offset: int
    memory: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    name: str
    nbytes: int
    transfers: tuple[Transfer, ...]


def files_of(strategy: Alternative, state: State) -> list[FilePlan]:
    """The files of a strategy and the transfers to or from them, in order."""
    spans = spans_of(state, aligned=strategy.aligned)
    if strategy.layout == "tensor":
        return [_file(strategy, f"tensor-{i}", [span], 0) for i, span in enumerate(spans)]
    parts = _parts(spans, strategy.ranks)
    if strategy.layout == "rank":
        return [_file(strategy, f"rank-{i}", part, 0) for i, part in enumerate(parts)]
    moved = [_file(strategy, "", part, part[0][0]).transfers for part in parts]
    # In turns, as several writers do.
    longest = max(map(len, moved))
    transfers = tuple(part[i] for i in range(longest) for part in moved if i < len(part))
    return [FilePlan("shared", spans[-1][1], transfers)]


def _parts(spans: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Neighbouring tensors for each rank, of about equally many bytes; every rank has one."""
    parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    total = spans[-1][1]
    for begin, end in spans:
        parts[min(count - 1, (begin + end) * count // (2 * total))].append((begin, end))
    return [part for part in parts if part]


def _file(
    strategy: Alternative, name: str, spans: list[tuple[int, int]], file_begin: int
) -> FilePlan:
    """A file of neighbouring tensors, the first of which lies at `file_begin`."""
    first, last = spans[0][0], spans[-1][1]
    whole = [(first, last)] if strategy.coalesced else spans
    transfers = tuple(
        Transfer(file_begin + begin - first, begin, end - begin)
        for span in whole
        for begin, end in _blocks(*span, strategy.block_bytes)
    )
    return FilePlan(name, last - first, transfers)


def _blocks(begin: int, end: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, block_bytes):
        yield at, min(end, at + block_bytes)
