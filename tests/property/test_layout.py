"""Whatever the mesh and the splits: boxes tile the tensor, and a search misses none."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.layout.layout import Box, Layout
from support.meshes import layouts, meshes

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    shape = draw(shapes)
    return shape, draw(layouts(draw(meshes()), len(shape)))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.offsets, box.ends)))


@given(placed())
def test_boxes_tile_the_tensor(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    found = Counter(point for box, _ in layout.boxes(shape) for point in elements(box))
    assert found == Counter(elements(Box.whole(shape)))


@given(placed())
def test_a_rank_is_listed_with_its_box_and_with_no_other(
    case: tuple[tuple[int, ...], Layout],
) -> None:
    shape, layout = case
    listed = {rank: box for box, ranks in layout.boxes(shape) for rank in ranks}
    assert sum(len(ranks) for _, ranks in layout.boxes(shape)) == len(listed)
    for rank in layout.mesh.ranks:
        box = layout.box(shape, rank)
        assert listed.get(rank) == (box if box.numel else None)
        replicas = layout.replicas(rank)
        assert replicas[layout.replica_index(rank)] == rank
        assert len(replicas) == layout.replica_count
        assert {layout.box(shape, other) for other in replicas} == {box}


@pytest.mark.thorough
@given(placed(), st.data())
def test_a_search_finds_what_meets_and_nothing_else(
    case: tuple[tuple[int, ...], Layout], data: st.DataObject
) -> None:
    shape, layout = case
    low = tuple(data.draw(st.integers(0, size)) for size in shape)
    size = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True))
    within = Box(low, size)
    expected = [
        (box, ranks) for box, ranks in layout.boxes(shape) if elements(box) & elements(within)
    ]
    assert list(layout.boxes(shape, within)) == expected


@given(placed())
def test_no_box_is_larger_than_the_first(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    largest = layout.largest_box(shape).shape
    for rank in layout.mesh.ranks:
        sizes = layout.box(shape, rank).shape
        assert all(a <= b for a, b in zip(sizes, largest, strict=True))


@given(placed())
def test_coordinates_and_ranks_are_inverse(case: tuple[tuple[int, ...], Layout]) -> None:
    mesh = case[1].mesh
    assert [mesh.rank_at(mesh.coordinate(rank)) for rank in mesh.ranks] == list(mesh.ranks)
