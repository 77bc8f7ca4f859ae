"""Where states of pairs lie: on 1, 2 and 4 ranks, in every layout, and on tiers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from statehold import offload
from statehold.lowrank.parallel import parallelize
from support.small_llama import Llama, loss_of, low_rank, tokens_of

WAYS: dict[str, dict[str, Any]] = {
    "grouped": {"way": "bottleneck"},
    "single": {"way": "bottleneck", "grouped": False},
    "rank": {"way": "rank"},
}


class Place(NamedTuple):
    """Where a state lies: on how many ranks, and how; whether its moments lie on a tier."""

    world: int
    layout: str
    is_offloaded: bool = False

    def state(self, seed: int) -> dict[str, Any]:
        model = low_rank(1, seed=seed, dtype=torch.float32)
        self._split(model)
        return {"model": model, "optimizer": self._optimizer(model)}

    def _split(self, model: Llama) -> None:
        if self.layout == "alone":
            return
        if self.layout == "fsdp x grouped":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize(model, mesh)
            fully_shard(model, mesh=mesh["dp"])
            return
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        if self.layout == "fsdp":
            fully_shard(model, mesh=mesh)
        else:
            parallelize(model, mesh, **WAYS[self.layout])

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.is_offloaded:
            return offload.AdamW(model.named_parameters(), lr=1e-2, tiers=[offload.Host("4MiB")])
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


PLACES = [
    Place(4, "fsdp x grouped"),
    *(Place(4, name) for name in ("fsdp", *WAYS)),
    Place(4, "grouped", is_offloaded=True),
    *(Place(2, name) for name in ("fsdp", *WAYS)),
    Place(2, "grouped", is_offloaded=True),
    Place(1, "alone"),
    Place(1, "alone", is_offloaded=True),
]


def train(state: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        state["optimizer"].zero_grad()
        loss_of(state["model"], tokens_of(step)).backward()
        state["optimizer"].step()


def values(state: dict[str, Any]) -> list[Tensor]:
    """Parameters and moments, in the order of the parameters."""
    moments = state["optimizer"].state_dict()["state"]
    found: list[Tensor] = []
    for index, parameter in enumerate(state["model"].parameters()):
        found += parameter.detach(), moments[index]["exp_avg"], moments[index]["exp_avg_sq"]
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
