"""Checks that run on every rank of a job of four: offloaded optimizers of sharded parameters.

Each one trains beside torch's fused optimizer on the same shards, with the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from statehold import offload
from statehold.tensors.storable import local_of
from support.faults import must
from support.jobs import Job
from support.twins import same_bits

F32, BF16 = torch.float32, torch.bfloat16
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
STEPS = 3
# Larger than CUT on each rank, with rows that end within it; and 3 rows, so the last of 4 has none.
WIDE, ROWS, FEW = 300, 173, 3

Make = Callable[[torch.dtype], nn.Module]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, ROWS, dtype=dtype)
        self.down = nn.Linear(ROWS, FEW, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class EvenNet(Net):
    """Sizes that tensor parallel layers can compute with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.up = nn.Linear(WIDE, 184, dtype=dtype)
        self.down = nn.Linear(184, 4, dtype=dtype)


def fsdp(mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    model = Net(dtype)
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(EvenNet(dtype), mesh, plan)


def both(dtype: torch.dtype) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(tensor_parallel(mesh["tp"], dtype), mesh=mesh["dp"])


def replicated(dtype: torch.dtype) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net(dtype))


def shards(ranks: int) -> DeviceMesh:
    """This rank's mesh, where the job falls into meshes of so many ranks."""
    mesh = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("others", "shards"))
    return mesh["shards"]


LAYOUTS: dict[str, Make] = {
    "fsdp on 4": lambda dtype: fsdp(shards(4), dtype),
    "fsdp on 2": lambda dtype: fsdp(shards(2), dtype),
    "fsdp on 1": lambda dtype: fsdp(shards(1), dtype),
    "tp": lambda dtype: tensor_parallel(shards(4), dtype),
    "fsdp x tp": both,
    "ddp": replicated,
}


class Twins:
    """Two models of the same layout and weights: one is offloaded, and torch updates the other.

    masters: what torch's optimizer updates: the other's parameters, or float32 copies of these.
    """

    def __init__(self, job: Job, make: Make, dtype: torch.dtype, **offloading: Any) -> None:
        self.models = []
        for _ in range(2):
            torch.manual_seed(1)
            self.models.append(make(dtype))
        self.params, self.theirs = (list(model.parameters()) for model in self.models)
        is_half = dtype is BF16
        self.masters = [each.detach().float() for each in self.theirs] if is_half else self.theirs
        folder = job.folder / "tiers"
        folder.mkdir(exist_ok=True)
        given = {"tiers": [offload.Path(folder)], "subgroup_bytes": 50_000, **offloading}
        self.ours = offload.AdamW(self.models[0].named_parameters(), **OPTIONS, **given)
        self.torchs = torch.optim.AdamW(self.masters, **OPTIONS, fused=True)

    def backward(self, x: torch.Tensor) -> None:
        """Of both; the losses and the norms by which gradients are clipped are the same."""
        losses, norms = [], []
        for model in self.models:
            loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        must(same_bits(*map(_plain, losses)))
        must(same_bits(*map(_plain, norms)))
        must(bool(_plain(norms[0]) > 0.1), "nothing is clipped")

    def step(self) -> None:
        self.ours.step()
        self.ours.zero_grad()
        if self.masters is not self.theirs:
            for master, theirs in zip(self.masters, self.theirs, strict=True):
                master.grad = theirs.grad.float()
        self.torchs.step()
        with torch.no_grad():
            for master, theirs in zip(self.masters, self.theirs, strict=True):
                theirs.copy_(master)
                master.grad = theirs.grad = None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward(torch.randn(8, WIDE))
            self.step()

    def check(self) -> None:
        """The same bits and placements, in weights and state."""
        must(all(map(same_local_bits, self.params, self.theirs)))
        ours, torchs = self.ours.state_dict()["state"], self.torchs.state_dict()["state"]
        must(ours.keys() == torchs.keys())
        for index, master in enumerate(self.masters):
            must(ours[index].keys() - {"master"} == torchs[index].keys())
            for name, value in torchs[index].items():
                must(same_local_bits(ours[index][name], value), (index, name))
            if self.masters is not self.theirs:
                must(same_local_bits(ours[index]["master"], master), index)


def same_local_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    placed = [getattr(each, "_spec", None) for each in (one, other)]
    if any(placed) and placed[0].placements != placed[1].placements:
        return False
    return same_bits(local_of(one), local_of(other)) and one.shape == other.shape


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_loss_and_weights_are_those_of_torch(job: Job) -> None:
    for name, make in LAYOUTS.items():
        for dtype in (F32, BF16):
            twins = Twins(job, make, dtype)
            twins.train(STEPS)
            twins.check()
            if name == "fsdp on 1":
                must(twins.ours.stats.misses > 0, "the state never leaves memory")
            twins.ours.close()


def check_places_are_those_of_the_layout(job: Job) -> None:
    twins = Twins(job, LAYOUTS["fsdp x tp"], F32)
    for parameter in twins.ours._opened.parameters:
        place = parameter.place(job.rank)
        must(place.shape == tuple(parameter.tensor.shape))
        must(place.box == place.layout.box(place.shape, job.rank))
        must(place.box.shape == tuple(parameter.local.shape))
    twins.ours.close()
