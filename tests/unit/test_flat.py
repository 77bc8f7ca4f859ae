"""Runs of elements as boxes, against counting them."""

from __future__ import annotations

import itertools
import math

import pytest

from statehold.layout.flat import boxes_of_run

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
