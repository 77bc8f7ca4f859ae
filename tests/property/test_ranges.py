"""What is read of a chunk holds what is wanted, in whole pieces, and little else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.layout.layout import Box
from statehold.layout.plan import piece_count
from statehold.layout.ranges import SUM_DIGITS, ranges

BLOCK = 64


@st.composite
def chunks_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 24), max_size=4)))
    lows = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - low)) for size, low in zip(shape, lows, strict=True))
    return shape, Box(lows, sizes)


@pytest.mark.thorough
@given(chunks_and_boxes(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 40))
def test_ranges_cover_what_is_wanted_in_whole_pieces(
    case: tuple[tuple[int, ...], Box], item_bytes: int, start: int
) -> None:
    shape, wanted = case
    begin, nbytes = start * 8, math.prod(shape) * item_bytes
    count = piece_count(begin, nbytes, BLOCK)
    sums = "".join(f"{i:0{SUM_DIGITS}x}" for i in range(count))
    found = ranges(begin, sums, shape, wanted, item_bytes, BLOCK)

    mask = np.zeros(shape, dtype=bool)
    mask[tuple(map(slice, wanted.offsets, wanted.ends))] = True
    needed = begin + np.flatnonzero(np.repeat(mask.reshape(-1), item_bytes))
    read = np.concatenate([np.arange(each.begin, each.end) for each in found])
    assert set(needed) <= set(read)
    assert np.all(np.diff(read) > 0)
    end = begin + nbytes
    for each in found:
        assert each.begin == begin or each.begin % BLOCK == 0
        assert each.end == end or each.end % BLOCK == 0
        first = each.begin // BLOCK - begin // BLOCK
        pieces = piece_count(each.begin, each.end - each.begin, BLOCK)
        assert each.sums == sums[SUM_DIGITS * first : SUM_DIGITS * (first + pieces)]
        if each.box_begin is not None:
            inside = np.arange(each.begin, each.end)
            at = np.searchsorted(needed, inside)
            assert np.array_equal(needed[at], inside)
            assert at[0] == each.box_begin


def test_pieces_of_which_all_is_wanted_are_apart() -> None:
    sums = "0" * SUM_DIGITS * 10
    found = ranges(32, sums, (40, 16), Box((4, 0), (20, 16)), 1, BLOCK)
    assert [(each.begin, each.end, each.box_begin) for each in found] == [
        (64, 128, None),
        (128, 384, 32),
        (384, 448, None),
    ]


def test_rows_far_apart_are_read_one_by_one() -> None:
    sums = "0" * SUM_DIGITS * 100
    found = ranges(0, sums, (10, 640), Box((2, 64), (3, 64)), 1, BLOCK)
    assert [(each.begin, each.end) for each in found] == [
        (1344, 1408),
        (1984, 2048),
        (2624, 2688),
    ]


def test_a_column_of_short_rows_is_read_in_one() -> None:
    sums = "0" * SUM_DIGITS * 10
    found = ranges(0, sums, (40, 16), Box((8, 0), (8, 8)), 1, BLOCK)
    assert [(each.begin, each.end) for each in found] == [(128, 256)]


def test_nothing_wanted_is_nothing_read() -> None:
    assert ranges(0, "0" * SUM_DIGITS, (4, 4), Box((0, 2), (4, 0)), 1, BLOCK) == []
