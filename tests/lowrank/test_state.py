"""Steps of pairs: what one layout has saved, every other one restores, weights and moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import statehold
from statehold.lowrank.parallel import parallelize
from support.gloo import run_ranks
from support.small_llama import Llama, loss_of, low_rank, tokens_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "fsdp": {},
    "grouped": {"way": "bottleneck"},
    "single": {"way": "bottleneck", "grouped": False},
    "rank": {"way": "rank"},
}


def in_layout(name: str, seed: int = 0) -> Llama:
    model = low_rank(1, seed=seed)
    if name == "alone":
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    if name == "fsdp":
        fully_shard(model, mesh=mesh)
    else:
        parallelize(model, mesh, **LAYOUTS[name])
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        state["optimizer"].zero_grad()
        loss_of(state["model"], tokens_of(step)).backward()
        state["optimizer"].step()


def values(state: dict[str, Any]) -> list[Tensor]:
    """Parameters and moments, whole, in the order of the parameters."""
    found = []
    for each in state["model"].parameters():
        own = state["optimizer"].state[each]
        for tensor in (each.detach(), own["exp_avg"], own["exp_avg_sq"]):
            found.append(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone())
    return found


def restored_by_others(rank: int, world: int, runs: str) -> list[tuple[str, str, bool]]:
    """Save in each layout, and restore each step in each layout. Whether all bits are there."""
    saved = {}
    for name in LAYOUTS:
        if name == "alone" and world > 1:
            continue
        state = state_of(in_layout(name))
        train(state, 2)
        with statehold.Checkpointer(f"{runs}/{name}-{world}") as ckpt:
            ckpt.save(2, state).wait("committed")
        saved[name] = values(state)
    found = []
    for name in LAYOUTS:
        if name == "alone" and world > 1:
            continue
        for other, expected in saved.items():
            state = state_of(in_layout(name, seed=1))
            train(state, 1)  # other moments than those of the step
            with statehold.Checkpointer(f"{runs}/{other}-{world}") as ckpt:
                assert ckpt.restore(state) == 2
            own = values(state)
            is_same = all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
            found.append((other, name, is_same and any(each.any() for each in own)))
    return found


@pytest.mark.thorough
def test_every_layout_restores_into_every_other(tmp_path: Path) -> None:
    for found in run_ranks(restored_by_others, 2, tmp_path, str(tmp_path)):
        assert len(found) == 16
        assert [pair for *pair, is_same in found if not is_same] == []


def bits_at(rank: int, world: int, run: str, layout: str) -> list[Tensor]:
    state = state_of(in_layout(layout, seed=1))
    with statehold.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 2
    return values(state)


def save_at(rank: int, world: int, run: str, layout: str) -> list[Tensor]:
    state = state_of(in_layout(layout))
    train(state, 2)
    with statehold.Checkpointer(run) as ckpt:
        ckpt.save(2, state).wait("committed")
    return values(state)


@pytest.mark.thorough
def test_a_step_goes_from_two_ranks_to_one_and_to_four(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    expected = run_ranks(save_at, 2, tmp_path, run, "grouped")[0]
    for world, layout in ((1, "alone"), (4, "rank"), (4, "grouped")):
        for own in run_ranks(bits_at, world, tmp_path, run, layout):
            assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True)), layout
