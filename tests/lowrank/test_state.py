"""Steps of pairs: what one layout has saved, every other one restores, weights and moments.

One job of four ranks saves a step in each layout on 4, 2 and 1 ranks, and restores the steps in
each of them. Smaller jobs are its first ranks, in a group of their own. The everyday suite does so
in five layouts. STATEHOLD_LOWRANK_KILLS does it in all, on all numbers of ranks.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import statehold
from statehold import lowrank
from support.gloo import JOIN_S, run_ranks
from support.pairs import PLACES, Place, train, values, whole
from support.small_llama import RANK, low_rank

pytestmark = pytest.mark.thorough

safetensors = pytest.importorskip("safetensors")

ALL = bool(os.environ.get("STATEHOLD_LOWRANK_KILLS"))
EVERYDAY = [
    Place(4, "fsdp x grouped"), Place(2, "grouped"), Place(2, "rank"),
    Place(2, "grouped", is_offloaded=True), Place(1, "alone"),
]  # fmt: skip
CHOSEN = PLACES if ALL else EVERYDAY


def is_part_of(tensor: Tensor, expected: Tensor) -> bool:
    """Whether this rank has its part of a tensor, bit for bit."""
    if not isinstance(tensor, DTensor):
        return torch.equal(tensor, expected)
    if any(type(each) is not Shard and each.is_shard() for each in tensor.placements):
        return torch.equal(tensor.full_tensor(), expected)  # FSDP over tensor parallelism
    placed = distribute_tensor(
        expected, tensor.device_mesh, tensor.placements, src_data_rank=None
    )  # fmt: skip
    return torch.equal(tensor.to_local(), placed.to_local())


def is_in(rank: int, world: int, meeting: Path) -> bool:
    """Leave the group of before. Whether this rank is one of the next `world` ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < world:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world,
            timeout=timedelta(seconds=JOIN_S),
        )  # fmt: skip
    return rank < world


def travelled(rank: int, _: int, folder: str) -> list[tuple[Place, Place, bool]]:
    """Where each step was saved and restored, and whether all bits are there."""
    found: list[tuple[Place, Place, bool]] = []
    for number, world in enumerate((4, 2, 1, 1, 2, 4)):
        if not is_in(rank, world, Path(folder, f"meeting-{number}")):
            continue
        here = [each for each in CHOSEN if each.world == world]
        with statehold.Checkpointer(f"{folder}/run") as ckpt:
            for place in here:
                if number < 3:
                    _save(ckpt, place, rank, folder)
                else:
                    found += _restored(ckpt, place, folder)
    return found


def _save(ckpt: statehold.Checkpointer, place: Place, rank: int, folder: str) -> None:
    step = CHOSEN.index(place)
    state = place.state(seed=step)
    train(state, 1)
    expected = [whole(each) for each in values(state)]
    if rank == 0:
        torch.save(expected, f"{folder}/{step}.pt")
    ckpt.save(step, state).wait("committed")


def _restored(
    ckpt: statehold.Checkpointer, place: Place, folder: str
) -> list[tuple[Place, Place, bool]]:
    state = place.state(seed=99)
    train(state, 1)
    found = []
    for step in range(len(CHOSEN)):
        assert ckpt.restore(state, step) == step
        expected = torch.load(f"{folder}/{step}.pt")
        own = values(state)
        is_same = all(map(is_part_of, own, expected))
        found.append((CHOSEN[step], place, is_same and all(each.any() for each in expected)))
    return found


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("journey")
    return folder, run_ranks(travelled, 4, folder, str(folder))


def test_every_layout_restores_into_every_other(journey: tuple[Path, list[Any]]) -> None:
    ranks = journey[1]
    assert {(here, there) for here, there, _ in ranks[0]} == {*itertools.product(CHOSEN, CHOSEN)}
    for rank, found in enumerate(ranks):
        assert [pair for *pair, is_same in found if not is_same] == []
        here = [place for place in CHOSEN if place.world > rank]
        assert len(found) == len(CHOSEN) * len(here)


def test_an_export_has_one_tensor_for_each_factor(
    journey: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Of a step that two ranks have saved along the bottleneck."""
    from safetensors.torch import load_file

    step = CHOSEN.index(Place(2, "grouped"))
    statehold.export_step(f"{journey[0]}/run@{step}", tmp_path / "out", "hf")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = load_file(file)
    model = low_rank(1, dtype=torch.float32)
    expected = torch.load(f"{journey[0]}/{step}.pt")[::3]
    assert found.keys() == model.state_dict().keys()
    for (name, parameter), value in zip(model.named_parameters(), expected, strict=True):
        assert found[name].shape == parameter.shape
        assert torch.equal(found[name], value), name
    a, b = (found[f"model.layers.0.mlp.up_proj.{factor}"] for factor in "ab")
    assert a.shape[0] == b.shape[1] == RANK
    model.load_state_dict(found)
    assert isinstance(model.model.layers[0].mlp.up_proj, lowrank.LowRankLinear)
