"""Runs of elements as boxes, against counting them."""

from __future__ import annotations

import itertools
import math

import pytest

from statehold.layout.flat import boxes_of_run, parts_of, run_of
from statehold.layout.layout import Box

SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4), (1, 1, 3), (4, 1), (2, 1, 3, 2), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_boxes_hold_the_run_in_its_order(shape: tuple[int, ...]) -> None:
    places = {at: i for i, at in enumerate(itertools.product(*map(range, shape)))}
    count = math.prod(shape)
    for begin, end in itertools.combinations_with_replacement(range(count + 1), 2):
        boxes = list(boxes_of_run(shape, begin, end))
        got = [
            places[at]
            for box in boxes
            for at in itertools.product(*map(range, box.offsets, box.ends))
        ]
        assert got == list(range(begin, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_run_of_a_box_is_counted(shape: tuple[int, ...]) -> None:
    """Every box in a tensor that lies somewhere else, against a list of its elements."""
    outer = Box(tuple(range(7, 7 + len(shape))), shape)
    places = {at: i for i, at in enumerate(itertools.product(*map(range, shape)))}
    ranges = [list(itertools.combinations(range(-1, size + 2), 2)) for size in shape]
    for cuts in itertools.product(*ranges):
        low = tuple(begin for begin, _ in cuts)
        size = tuple(end - begin for begin, end in cuts)
        box = Box(tuple(a + b for a, b in zip(low, outer.offsets, strict=True)), size)
        inside = all(
            0 <= begin < end <= most for (begin, end), most in zip(cuts, shape, strict=True)
        )
        found = sorted(places[at] for at in places if _is_in(at, cuts)) if inside else []
        is_run = bool(found) and found == list(range(found[0], found[-1] + 1))
        assert run_of(box, outer) == ((found[0], found[-1] + 1) if is_run else None)
    assert run_of(Box((0,) * 9, (1,) * 9), outer) is None


def _is_in(at: tuple[int, ...], cuts: tuple[tuple[int, int], ...]) -> bool:
    return all(begin <= index < end for index, (begin, end) in zip(at, cuts, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_the_parts_of_a_box_are_small_and_in_order(shape: tuple[int, ...], most: int) -> None:
    outer = Box(tuple(range(3, 3 + len(shape))), shape)
    parts = list(parts_of(outer, most))
    got = [at for part in parts for at in itertools.product(*map(range, part.offsets, part.ends))]
    assert got == list(itertools.product(*map(range, outer.offsets, outer.ends)))
    assert all(0 < part.numel <= most for part in parts)
