"""Shares: who writes a box that many hold, how large ones are cut, and the cache."""

from __future__ import annotations

import pytest

from statehold.errors import InvariantError
from statehold.layout.layout import Layout, Mesh
from statehold.layout.plan import TensorSpec, plan_save
from statehold.layout.share import (
    PIECE_BYTES,
    SPLIT_BYTES,
    Balance,
    HeldTensor,
    Part,
    PlanCache,
    Spread,
    balance,
    share,
)
from statehold.ranks.membership import Membership
from statehold.units import MiB
from support.calls import calls_of
from support.meshes import local_spec, local_specs, mesh
from support.steps import spec


def written_bytes(specs: list[TensorSpec], rank: int) -> int:
    return sum(part.spec.nbytes for part in share(specs, rank).parts)


def test_tensors_of_one_rank_are_written_whole_in_their_order() -> None:
    specs = [spec("b", "F32", 2), spec("a", "U8", 0), spec("c", "F32", eager=True)]
    found = share(specs, 3)
    assert tuple(found.parts) == tuple(Part(own, index, None) for index, own in enumerate(specs))
    assert found.held[1] == HeldTensor("a", "U8", (0,), None, 0)


def test_every_rank_writes_its_own_box_of_a_sharded_tensor() -> None:
    layout = Layout(mesh(4), ((0, 0),))
    for rank in range(3):
        own = local_spec("w", "F32", (6, 5), layout, rank)
        found = share([own], rank)
        assert tuple(found.parts) == (Part(own, 0, None),)
        assert found.held == (HeldTensor("w", "F32", (6, 5), layout, 0),)


def test_an_empty_box_is_held_and_not_written() -> None:
    layout = Layout(mesh(4), ((0, 0),))
    found = share([local_spec("w", "F32", (6, 5), layout, 3)], 3)
    assert not list(found.parts)
    assert found.held == (HeldTensor("w", "F32", (6, 5), layout, 0),)


def test_on_a_mesh_of_one_rank_even_nothing_is_written() -> None:
    own = local_spec("w", "F32", (0,), Layout(mesh(1), ((0, 0),)), 0)
    assert tuple(share([own], 0).parts) == (Part(own, 0, None),)


def test_a_small_replicated_tensor_has_one_writer_the_largest_first() -> None:
    layout = Layout(mesh(2))
    tensors = {f"t{size}": ("U8", (size,), layout) for size in (1, 2, 3, 4)}
    names = [{part.spec.name for part in share(local_specs(tensors, r), r).parts} for r in (0, 1)]
    assert names == [{"t4", "t1"}, {"t3", "t2"}]


def test_a_large_replicated_tensor_is_cut_over_all_replicas() -> None:
    """FSDP over axis 1 of two replicas: each writes half of the rows of its shard."""
    layout = Layout(mesh(2, 2), ((1, 0),))
    shape = (4 * SPLIT_BYTES // 1024, 1024)
    cut = Layout(layout.mesh, ((1, 0), (0, 0)))
    for rank in range(4):
        own = local_spec("w", "U8", shape, layout, rank)
        found = share([own], rank)
        rows = shape[0] // 4
        first = rank // 2 * rows
        assert found.held == (HeldTensor("w", "U8", shape, cut, 0),)
        (part,) = found.parts
        assert part.rows == (first, first + rows)
        assert part.spec == own._replace(
            shape=(rows, 1024),
            nbytes=rows * 1024,
            offsets=(rank % 2 * shape[0] // 2 + first, 0),
        )


def test_a_cut_stops_at_the_least_piece() -> None:
    """64 replicas, 8 pieces of 1 MiB: the mesh as written has eight times eight ranks."""
    layout = Layout(mesh(64))
    cut = Layout(Mesh((8, 8), layout.mesh.ranks), ((1, 0),))
    tensors = {f"t{i}": ("U8", (SPLIT_BYTES,), layout) for i in range(8)}
    pieces = 0
    for rank in range(64):
        found = share(local_specs(tensors, rank), rank)
        assert {held.layout for held in found.held} == {cut}
        assert sorted(held.writer for held in found.held) == list(range(8))
        assert [part.spec.nbytes for part in found.parts] == [PIECE_BYTES]
        pieces += len(found.parts.specs)
    assert pieces == 64


def test_the_axes_behind_a_cut_move() -> None:
    """Replicas along axis 0, tensor parallel along axis 1."""
    layout = Layout(mesh(16, 3), ((1, 1),))
    (held,) = share([local_spec("w", "U8", (MiB, 24), layout, 5)], 5).held
    assert held.layout == Layout(Mesh((2, 8, 3), layout.mesh.ranks), ((2, 1), (1, 0)))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("U8", (SPLIT_BYTES - 1,)),  # too small
        ("U8", (1, SPLIT_BYTES)),  # one row
        ("U8", (9, SPLIT_BYTES)),  # 2, 2, 2, 2, 1 rows, and two ranks without
        ("F4", (2 * SPLIT_BYTES,)),  # a row of half a byte
    ],
)
def test_what_is_not_cut(dtype: str, shape: tuple[int, ...]) -> None:
    layout = Layout(mesh(7))  # a prime: all pieces or none
    (held,) = share([local_spec("w", dtype, shape, layout, 0)], 0).held
    assert held.layout is layout


def test_a_few_tensors_go_to_replicas_far_apart() -> None:
    layout = Layout(mesh(1024))
    tensors = {f"t{i}": ("U8", (100,), layout) for i in range(7)}
    writers = {held.writer for held in share(local_specs(tensors, 0), 0).held}
    assert {writer // 128 for writer in writers} == set(range(7))


def test_ranks_that_differ_in_size_agree() -> None:
    """The last shard is empty, and still knows who writes the others."""
    layout = Layout(mesh(2, 3), ((1, 0),))
    tensors = {f"t{i}": ("F32", (4, 1 + i % 7), layout) for i in range(50)}
    first, *others = [share(local_specs(tensors, rank), rank).held for rank in range(6)]
    assert all(other == first for other in others)


def test_thousands_of_tensors_balance() -> None:
    layout = Layout(mesh(8))
    tensors = {f"t{i}": ("U8", (1 + i * i % 9973, 1024), layout) for i in range(2000)}
    loads = [written_bytes(local_specs(tensors, rank), rank) for rank in range(8)]
    found = balance(loads, ["a"] * 4 + ["b"] * 4)
    assert found.ranks.max <= 1.001 * found.ranks.mean


@pytest.mark.parametrize(
    "change", [{"offsets": (1, 0)}, {"shape": (2, 5)}, {"layout": Layout(Mesh((2,), (7, 8)))}]
)
def test_a_box_that_is_not_the_rank_s(change: dict[str, object]) -> None:
    own = local_spec("w", "F32", (6, 5), Layout(mesh(2), ((0, 0),)), 0)
    with pytest.raises(InvariantError, match="another box") as caught:
        share([own._replace(**change)], 0)
    assert {"tensor", "rank", "expected", "got"} <= set(caught.value.facts)


def test_balance() -> None:
    found = balance([1, 2, 6, 3], ["x", "x", "y", "y"])
    assert found == Balance(Spread(1, 3.0, 6), Spread(3, 6.0, 9))


def test_the_cache_keeps_the_share_with_the_plan() -> None:
    layout = Layout(mesh(4))
    tensors = {f"t{i}": ("F32", (i, 3), layout) for i in range(20)}
    cache = PlanCache(Membership(2, 4))
    first = cache.get(local_specs(tensors, 2), 1)
    again = cache.get(local_specs(tensors, 2), 2)
    assert again.share is first.share
    assert again.save == first.save.at_step(2)
    assert first.save == plan_save(first.share.parts.specs, step=1, world_size=4, rank=2)
    tensors["t3"] = ("F32", (3, 3), Layout(mesh(2, 2)))  # the same boxes, known to other ranks
    assert cache.get(local_specs(tensors, 2), 3).share == share(local_specs(tensors, 2), 2)


def test_the_number_of_ranks_costs_nothing() -> None:
    def calls(ranks: int) -> int:
        layout = Layout(mesh(ranks))
        specs = [local_spec(f"t{i}", "BF16", (4096 + i, 4096), layout, 1) for i in range(1000)]
        share(specs, 1)  # the mesh's own index, once
        return calls_of(lambda: share(specs, 1))

    assert calls(16384) <= calls(16)
