"""Layouts: boxes cover, replicas agree, and a search for boxes finds what a scan finds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statehold.layout.layout import Box, Layout, Mesh
from support.layouts import layouts

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def scanned(layout: Layout, shape: tuple[int, ...], within: Box) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for rank in layout.mesh.ranks:
        box = layout.box(shape, rank)
        if box.numel and box.intersection(within):
            found.setdefault(box, []).append(rank)
    return found


@pytest.mark.thorough
@given(shapes, st.integers(1, 12), st.data())
@settings(max_examples=300, deadline=None)
def test_boxes_are_those_of_the_ranks(shape: tuple[int, ...], size: int, data: Any) -> None:
    layout = data.draw(layouts(size, len(shape)))
    low = [data.draw(st.integers(0, n)) for n in shape]
    sizes = [data.draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True)]
    for within in (Box.whole(shape), Box(tuple(low), tuple(sizes))):
        found = list(layout.boxes(shape, within))
        expected = scanned(layout, shape, within)
        assert {box: sorted(ranks) for box, ranks in found} == {
            box: sorted(ranks) for box, ranks in expected.items()
        }
        assert len(found) == len(expected)
        cuts = [each for box, _ in found if (each := box.intersection(within))]
        assert sum(each.numel for each in cuts) == within.numel


@given(shapes, st.integers(1, 12), st.data())
@settings(max_examples=100, deadline=None)
def test_replicas_hold_one_box(shape: tuple[int, ...], size: int, data: Any) -> None:
    layout = data.draw(layouts(size, len(shape)))
    for rank in range(size):
        ranks = layout.replicas(rank)
        assert len(ranks) == layout.replica_count
        assert ranks[layout.replica_index(rank)] == rank
        assert {layout.box(shape, each) for each in ranks} == {layout.box(shape, rank)}


def test_a_search_does_not_visit_every_rank() -> None:
    """A mesh of a million ranks that does not exist: a scan of it would take minutes."""
    mesh = Mesh((1000, 1000), tuple(range(1_000_000)))
    layout = Layout(mesh, ((1, 0), (0, 0)))
    shape = (10_000_000,)
    for rank in range(0, 1_000_000, 10_007):
        box = layout.box(shape, rank)
        assert list(layout.boxes(shape, box)) == [(box, (rank,))]
