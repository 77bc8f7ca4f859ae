"""The strategies that a profile can choose from, and the state that they save.

Owns: the definition and the name of a strategy; the sizes of a model's tensors, and their places.
Invariants: pure.
Not here: moving the bytes (measure), which strategies are tried (sweep).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
