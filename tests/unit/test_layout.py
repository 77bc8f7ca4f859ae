"""Layouts: boxes, meshes, the order of splits, and what they cost on thousands of ranks."""

from __future__ import annotations

import math

import pytest

from statehold.layout.layout import Box, Layout, Mesh, chunk_range
from support.calls import calls_of
from support.meshes import mesh

Case = tuple[tuple[int, ...], list[str], tuple[tuple[int, int], ...]]


def test_boxes_meet() -> None:
    box = Box((2, 0), (3, 4))
    assert box.ends == (5, 4)
    assert box.numel == 12
    assert box.intersection(Box((4, 1), (9, 2))) == Box((4, 1), (1, 2))
    assert box.intersection(Box((5, 0), (1, 4))) is None
    assert box.intersection(Box((2, 0), (0, 4))) is None
    assert Box((4, 1), (1, 2)).relative_to(box) == Box((2, 1), (1, 2))
    assert str(box) == "[2:5, 0:4]"


def test_a_scalar_is_a_box_of_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.numel == 1
    assert scalar.intersection(scalar) == scalar
    assert list(Layout(mesh(2)).boxes(())) == [(scalar, (0, 1))]


@pytest.mark.parametrize("size", [0, 1, 5, 8, 9, 17])
@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_chunk_range_cuts_as_torch_chunk(size: int, parts: int) -> None:
    torch = pytest.importorskip("torch")
    expected = [piece.tolist() for piece in torch.arange(size).chunk(parts) if len(piece)]
    found = [list(range(*chunk_range(size, parts, index))) for index in range(parts)]
    assert found == expected + [[]] * (parts - len(expected))


def test_places_in_a_mesh() -> None:
    grid = Mesh((2, 3), (10, 11, 12, 20, 21, 22))
    assert grid.coordinate(21) == (1, 1)
    assert grid.rank_at((1, 1)) == 21
    assert 20 in grid
    assert 13 not in grid
    with pytest.raises(KeyError):
        grid.coordinate(13)
    assert hash(grid) == hash(Mesh((2, 3), (10, 11, 12, 20, 21, 22)))


def test_splits_apply_in_their_order() -> None:
    """FSDP (axis 0) over tensor parallel (axis 1) on one dim: tensor parallel cuts first."""
    grid = mesh(2, 2)
    fsdp_over_tp = Layout(grid, ((1, 0), (0, 0)))
    assert [fsdp_over_tp.box((8,), rank).offsets for rank in range(4)] == [(0,), (4,), (2,), (6,)]
    tp_over_fsdp = Layout(grid, ((0, 0), (1, 0)))
    assert [tp_over_fsdp.box((8,), rank).offsets for rank in range(4)] == [(0,), (2,), (4,), (6,)]


def test_replicas() -> None:
    layout = Layout(Mesh((2, 2, 2), tuple(range(10, 18))), ((1, 0),))
    assert layout.replica_axes == (0, 2)
    assert layout.replica_count == 4
    assert layout.replicas(16) == (12, 13, 16, 17)
    assert [layout.replica_index(rank) for rank in (12, 13, 16, 17)] == [0, 1, 2, 3]
    assert list(layout.boxes((3,))) == [
        (Box((0,), (2,)), (10, 11, 14, 15)),
        (Box((2,), (1,)), (12, 13, 16, 17)),
    ]


def test_only_boxes_that_meet() -> None:
    layout = Layout(mesh(4, 4), ((0, 0), (1, 1)))
    within = Box((3, 0), (2, 2))
    assert list(layout.boxes((8, 8), within)) == [
        (Box((2, 0), (2, 2)), (4,)),
        (Box((4, 0), (2, 2)), (8,)),
    ]


# (mesh, placements as torch has them, splits)
PLAIN = [
    ((2, 2), ["S0", "S0"], ((0, 0), (1, 0))),
    ((2, 3), ["S1", "S0"], ((0, 1), (1, 0))),
    ((4, 2), ["S1", "R"], ((0, 1),)),
]
STRIDED = [
    ((3, 2), ["SS0:2", "S0"], ((1, 0), (0, 0))),  # FSDP over tensor parallel
    ((2, 3, 2), ["SS0:2", "S1", "S0"], ((2, 0), (0, 0), (1, 1))),
    ((2, 3, 2), ["R", "SS1:2", "S1"], ((2, 1), (1, 1))),  # replicated, FSDP, tensor parallel
    ((2, 2, 2), ["SS0:4", "SS0:2", "S0"], ((2, 0), (1, 0), (0, 0))),
]
# What torch says of uneven pieces below a _StridedShard is not what fully_shard() makes.
EVEN, UNEVEN = (24, 12), [(7, 5), (1, 3), (13, 2)]


def placement(text: str) -> object:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if text == "R":
        return Replicate()
    if text.startswith("SS"):
        return _StridedShard(int(text[2]), split_factor=int(text[4:]))
    return Shard(int(text[1]))


@pytest.mark.parametrize(
    ("case", "tensor"),
    [(case, EVEN) for case in PLAIN + STRIDED]
    + [(case, tensor) for case in PLAIN for tensor in UNEVEN],
)
def test_boxes_are_those_of_dtensor(case: Case, tensor: tuple[int, ...]) -> None:
    """torch's own arithmetic, for every coordinate of the mesh."""
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor import _utils

    shape, placements, splits = case
    layout, found = Layout(mesh(*shape), splits), [placement(each) for each in placements]
    for rank in layout.mesh.ranks:
        coordinate = list(layout.mesh.coordinate(rank))
        sizes, offsets = _utils._compute_local_shape_and_global_offset(
            tensor, shape, coordinate, found
        )
        box = layout.box(tensor, rank)
        assert box.shape == tuple(sizes)
        assert not box.numel or box.offsets == tuple(offsets)


@pytest.mark.parametrize("case", PLAIN + STRIDED)
@pytest.mark.parametrize("tensor", [EVEN, *UNEVEN])
def test_boxes_are_those_of_chunking_again_and_again(case: Case, tensor: tuple[int, ...]) -> None:
    """As fully_shard() chunks what tensor parallelism left, uneven or not."""
    torch = pytest.importorskip("torch")
    shape, _, splits = case
    layout = Layout(mesh(*shape), splits)
    whole = torch.arange(math.prod(tensor)).view(tensor)
    for rank in layout.mesh.ranks:
        local, coordinate = whole, layout.mesh.coordinate(rank)
        for axis, dim in splits:
            pieces = local.chunk(shape[axis], dim)
            empty = local.narrow(dim, 0, 0)
            local = pieces[coordinate[axis]] if coordinate[axis] < len(pieces) else empty
        box = layout.box(tensor, rank)
        assert box.shape == tuple(local.shape)
        assert torch.equal(whole[tuple(map(slice, box.offsets, box.ends))], local)


def test_a_box_of_a_large_mesh_is_found_at_once() -> None:
    """16,384 ranks, 2,048 boxes: it takes work in proportion to the one that is wanted."""
    layout = Layout(mesh(2, 16, 64, 8), ((3, 0), (2, 1)))
    shape = (53248, 16384)
    within = layout.box(shape, 5000)
    assert [box for box, _ in layout.boxes(shape, within)] == [within]
    assert calls_of(lambda: list(layout.boxes(shape, within))) < 100  # all boxes: 38,133
