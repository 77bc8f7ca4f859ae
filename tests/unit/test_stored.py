"""Which rank has a file on storage in its part of a step, and what its record says of it."""

from __future__ import annotations

import pytest

from statehold.errors import InvariantError
from statehold.layout.layout import Layout, Mesh
from statehold.layout.plan import TensorSpec, plan_save
from statehold.layout.share import Held
from statehold.layout.stored import StoredFile, check, held_in

SHARDED, REPLICATED = Layout(Mesh((2,), (0, 1)), ((0, 0),)), Layout(Mesh((2,), (0, 1)))


def spec(name: str, layout: Layout | None, rank: int = 0) -> TensorSpec:
    offsets = (2 * rank,) if layout is SHARDED else (0,)
    return TensorSpec(name, "U8", (2,), 2, False, layout, (4 if layout is SHARDED else 2,), offsets)


def file_of(*specs: TensorSpec) -> StoredFile:
    plan = plan_save(specs, step=0)
    count = 1 + len(specs)
    return StoredFile(
        "/f", plan.file_bytes, plan.data_begin, plan.specs, plan.begins, bytes(8 * count)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_writes_its_shard_and_the_first_one_what_all_hold(rank: int) -> None:
    own = file_of(spec("own", None), spec("shard", SHARDED, rank))
    shared = file_of(spec("all", REPLICATED), spec("padding", None))
    check([own, shared], rank, ())
    assert own.is_written_by(rank)
    assert shared.is_written_by(rank) is (rank == 0)
    names = [held.name for held in held_in([own, shared], rank)]
    assert names == ["own", "shard", "all", *["padding"] * (rank == 0)]
    assert held_in([shared], rank)[0] == Held("all", "U8", (2,), REPLICATED)


def test_a_file_that_two_ranks_would_have_to_write_is_refused() -> None:
    mixed = file_of(spec("shard", SHARDED, 1), spec("all", REPLICATED))
    with pytest.raises(InvariantError):
        mixed.is_written_by(1)


def test_parts_of_different_tensors_of_one_name_are_refused() -> None:
    files = [file_of(spec("t", SHARDED)), file_of(spec("t", REPLICATED))]
    with pytest.raises(InvariantError):
        check(files, 0, ())


def test_a_name_that_the_rank_saves_itself_is_refused() -> None:
    with pytest.raises(InvariantError):
        check([file_of(spec("t", None))], 0, {"t"})


def test_another_rank_s_shard_is_refused() -> None:
    with pytest.raises(InvariantError):
        check([file_of(spec("t", SHARDED, 1))], 0, ())
