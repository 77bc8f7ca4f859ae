"""Runs of elements as boxes: the rows and columns of a range of a tensor's bytes.

Owns: the cutting of elements [begin, end), counted in C order, into boxes, and the way back.
Invariants: the boxes are disjoint, in the order of their elements, and each dense in that order.
Their number is less than twice the number of dims.
Not here: which bytes are read or written (ranges, plan), who moves them (devices).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from statehold.layout.layout import Box


def boxes_of_run(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The elements [begin, end) of a tensor of `shape`."""
    if begin >= end:
        return
    if not shape or (begin, end) == (0, math.prod(shape)):
        yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows: [first, last)
    if first > last:  # inside one row
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    yield from _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, end - last * row)


def parts_of(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements that make up a box, in the order of their elements."""
    for begin in range(0, box.numel, most):
        for inner in boxes_of_run(box.shape, begin, min(begin + most, box.numel)):
            yield inner.within(box)


def run_of(box: Box, outer: Box) -> tuple[int, int] | None:
    """[begin, end) if these elements of `outer`, counted in C order, are those of `box`.

    None for an empty box, one that is not inside, and one that is not dense in that order.
    """
    if len(box.shape) != len(outer.shape):
        return None
    begin, is_whole_row = 0, True
    for low, size, whole in zip(
        box.relative_to(outer).offsets, box.shape, outer.shape, strict=True
    ):
        if not 0 <= low < low + size <= whole or not (is_whole_row or size == whole):
            return None
        is_whole_row = is_whole_row and size == 1
        begin = begin * whole + low
    return begin, begin + box.numel


def _in_row(shape: Sequence[int], index: int, begin: int, end: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    if (begin, end) == (row, row) or index < 0:
        return
    for box in boxes_of_run(shape[1:], begin, end):
        yield Box((index, *box.offsets), (1, *box.shape))
