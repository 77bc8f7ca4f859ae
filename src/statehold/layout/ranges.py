"""The bytes of a chunk to read for a box of it: pure arithmetic.

Owns: the ranges of a file that hold the wanted elements, widened to whole pieces, because a piece
can only be verified as a whole; which checksum belongs to which piece.
Invariants: the ranges are sorted and disjoint. They cover every wanted element, begin and end at
pieces, and leave out bytes that lie at least one piece away from all wanted ones. If the wanted
bytes are contiguous, the pieces that are wanted as a whole are a range of their own.
Not here: who has the chunk (saved), where the elements go (read_plan), the reading (engine).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from statehold.layout.layout import Box
from statehold.layout.plan import pieces

SUM_DIGITS = 16


class Range(NamedTuple):
    """The bytes [begin, end) of a file, and the checksums of their pieces.

    box_begin: where they begin in the dense image of the wanted box, if all of them belong to it.
    """

    begin: int
    end: int
    sums: str
    box_begin: int | None = None


def sums_between(low: int, high: int, begin: int, sums: str, block_bytes: int) -> str:
    """The checksums of the pieces in [low, high), where `sums` are those from `begin` on."""
    first = begin // block_bytes
    last = (high - 1) // block_bytes - first + 1
    return sums[SUM_DIGITS * (low // block_bytes - first) : SUM_DIGITS * last]


def summed_pieces(
    begin: int, end: int, sums: str, block_bytes: int
) -> Iterator[tuple[int, int, str]]:
    """(begin, end, checksum) of each piece of the bytes [begin, end)."""
    for i, (low, high) in enumerate(pieces(begin, end - begin, block_bytes)):
        yield low, high, sums[SUM_DIGITS * i : SUM_DIGITS * (i + 1)]


def ranges(
    begin: int, sums: str, shape: Sequence[int], wanted: Box, item_bytes: int, block_bytes: int
) -> list[Range]:
    """The ranges to read of a chunk of `shape` at file offset `begin`, for the elements in
    `wanted`.

    `wanted` counts from the chunk's first element. `sums` are those of the whole chunk.
    """
    end = begin + math.prod(shape) * item_bytes

    def cut(low: int, high: int, box_begin: int | None = None) -> Range:
        return Range(low, high, sums_between(low, high, begin, sums, block_bytes), box_begin)

    extents = list(_extents(shape, wanted, item_bytes, block_bytes))
    found = [
        (max(low, begin), min(high, end)) for low, high in _joined(extents, begin, block_bytes)
    ]
    if len(extents) != 1 or extents[0][1] - extents[0][0] != wanted.numel * item_bytes:
        return [cut(low, high) for low, high in found]
    ((low, high),) = found
    first, last = (begin + at for at in extents[0])
    inner = first if first == low else -(-first // block_bytes) * block_bytes
    outer = last if last == high else last // block_bytes * block_bytes
    if inner >= outer:
        return [cut(low, high)]
    edges = [cut(low, inner)] * (low < inner), [cut(outer, high)] * (outer < high)
    return [*edges[0], cut(inner, outer, inner - first), *edges[1]]


def _extents(
    shape: Sequence[int], wanted: Box, item_bytes: int, block_bytes: int
) -> Iterator[tuple[int, int]]:
    """Byte ranges of the dense chunk that hold `wanted`, in order.

    The outer dims are taken index by index while the gap between two indices is longer than a
    piece. The inner dims are taken from their first to their last element.
    """
    if not wanted.numel:
        return
    steps = [item_bytes * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    spans = [0] * (len(shape) + 1)  # from the first to the last wanted element of the inner dims
    for dim in reversed(range(len(shape))):
        spans[dim] = spans[dim + 1] + (wanted.shape[dim] - 1) * steps[dim]
    outer = 0
    for dim in range(len(shape)):
        if steps[dim] - spans[dim + 1] > 2 * block_bytes:
            outer = dim + 1
    origin = sum(low * step for low, step in zip(wanted.offsets, steps, strict=True))
    for index in itertools.product(*(range(size) for size in wanted.shape[:outer])):
        at = origin + sum(i * step for i, step in zip(index, steps, strict=False))
        yield at, at + spans[outer] + item_bytes


def _joined(
    extents: Iterable[tuple[int, int]], begin: int, block_bytes: int
) -> Iterator[tuple[int, int]]:
    """The extents as file ranges widened to the grid; ranges that meet become one."""
    current: tuple[int, int] | None = None
    for low, high in extents:
        low = (begin + low) // block_bytes * block_bytes
        high = -(-(begin + high) // block_bytes) * block_bytes
        if current is None:
            current = low, high
        elif low <= current[1]:
            current = current[0], max(current[1], high)
        else:
            yield current
            current = low, high
    if current is not None:
        yield current
