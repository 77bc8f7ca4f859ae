"""The strategies and the states of the I/O study: descriptions, and the place of every byte.

Owns: the definition and the name of a strategy; the sizes of a model's tensors; the files and the
transfers of a strategy.
Invariants: pure. The transfers of a strategy cover every byte of the state once. Those of a direct
strategy begin and end on a page.
Not here: moving the bytes (sessions, threads), which strategies are tried (sweep).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from statehold.units import KiB, MiB, format_bytes

PAGE_BYTES = 4 * KiB
RANK_FILES = 4  # of several ranks on one node, and the writers of a shared file


class Mover(str, Enum):
    """Who moves the bytes."""

    IO_URING = "io_uring"
    THREADS = "threads"
    # statehold itself never does this: for strategies that its core does not have
    PYTHON = "Python threads"


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
    """One way to save and restore a state.

    layout: "tensor" (a file each), "rank" (a file each), or "shared" (one file, each rank its
        part).
    block_bytes: of the longest transfer. depth: transfers in flight.
    coalesced: transfers are blocks with whatever tensors lie in them; otherwise no transfer has
        bytes of two tensors.
    aligned: every tensor begins on a page.
    copy_threads: statehold's engine copies the tensors to buffers and checksums them; 0: nothing is
        copied, bytes only move.
    """

    mover: Mover = Mover.IO_URING
    layout: str = "rank"
    ranks: int = 1
    direct: bool = True
    block_bytes: int = 16 * MiB
    depth: int = 32
    coalesced: bool = True
    aligned: bool = True
    copy_threads: int = 0
    state: str = "model"

    @property
    def is_engine(self) -> bool:
        """Whether statehold saves like this; the others are alternatives."""
        return self.copy_threads > 0

    @property
    def name(self) -> str:
        files = {"tensor": "a file a tensor", "shared": f"one file, {self.ranks} writers"}
        layout = files.get(self.layout, "1 file" if self.ranks == 1 else f"{self.ranks} files")
        words = [
            "statehold" if self.is_engine else "bytes",
            self.mover.value,
            "direct" if self.direct else "buffered",
            layout,
            f"{format_bytes(self.block_bytes)} x {self.depth}",
        ]
        words += [f"{self.copy_threads} copying"] * self.is_engine
        words += ["not coalesced"] * (not self.coalesced)
        words += ["unaligned"] * (not self.aligned)
        words += ["equal tensors"] * (self.state == "uniform")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy and its timed operations, in an order in which each finds what it needs."""

    strategy: Strategy
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class State:
    """The sizes of the tensors that are saved."""

    name: str
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
    return State("model", tuple(weights + optimizer))


def _parameters(dim: int, layers: int) -> float:
    return float(dim * dim * (2 * _VOCABULARY + layers * (4 + 3 * _WIDTH)))


def uniform(total_bytes: int) -> State:
    """Equal tensors of 16 MiB, or smaller ones if there would be less than eight."""
    size = min(16 * MiB, max(PAGE_BYTES, total_bytes // 8 // PAGE_BYTES * PAGE_BYTES))
    return State("uniform", (size,) * max(1, total_bytes // size))


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


def spans_of(strategy: Strategy, state: State) -> list[tuple[int, int]]:
    """The place of each tensor in memory, [begin, end); aligned tensors are padded to whole
    pages."""
    spans, at = [], 0
    for size in state.sizes:
        padded = _whole_pages(size) if strategy.aligned else size
        spans.append((at, at + padded))
        at += padded
    return spans


def files_of(strategy: Strategy, state: State) -> list[FilePlan]:
    """The files of a strategy and the transfers to or from them, in order."""
    spans = spans_of(strategy, state)
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


def _file(strategy: Strategy, name: str, spans: list[tuple[int, int]], file_begin: int) -> FilePlan:
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


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
