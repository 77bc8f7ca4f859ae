"""Which rank has a file on storage in its part of a step, and what its record says of it."""

from __future__ import annotations

import pytest

from statehold.errors import InvariantError
from statehold.layout.layout import Layout, Mesh
from statehold.layout.plan import TensorSpec, plan_save
from statehold.layout.share import HeldTensor
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
def test_a_rank_names_the_tensors_of_its_files_each_once(rank: int) -> None:
    files = [file_of(spec("own", None), spec("shard", SHARDED, rank)), file_of(spec("pad", None))]
    check(files, rank, ())
    assert [held.name for held in held_in(files)] == ["own", "shard", "pad"]
    assert held_in(files)[1] == HeldTensor("shard", "U8", (4,), SHARDED)


def test_a_tensor_that_all_hold_is_in_a_file_of_the_first_rank() -> None:
    shared = file_of(spec("all", REPLICATED))
    check([shared], 0, ())
    with pytest.raises(InvariantError, match="cannot be part of a step"):
        check([shared], 1, ())


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
