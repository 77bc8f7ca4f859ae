"""The optimizer of a run: AdamW on the weights, on float32 masters of them, or on tiers.

Owns which one it is. Invariants: the one on tiers (statehold.offload) and the one on masters give
the same bits, which is what the demo of offloading shows. Leaves the schedule to the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from statehold import offload

if TYPE_CHECKING:
    from config import RunConfig

Fields = Mapping[str, torch.Tensor]


def adamw(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW; matrices decay, gains of norms do not."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.lr, "betas": (0.9, 0.95)}
    if config.offload:
        return offload.AdamW(
            groups, **options, tiers=tiers(config), subgroup_bytes=config.subgroup or None
        )
    if config.dtype != "float32":
        return MasterAdamW(groups, **options)
    return torch.optim.AdamW(groups, **options)


def tiers(config: RunConfig) -> list[offload.Host | offload.Path]:
    """Those of `--host` and `--offload DIR[=RATE],...`."""
    paths = (path.partition("=") for path in config.offload.split(","))
    return [
        offload.Host(config.host),
        *(offload.Path(directory, rate or None) for directory, _, rate in paths),
    ]


class MasterAdamW(torch.optim.AdamW):
    """torch's fused AdamW on float32 masters of parameters in 16 bit, all of it in memory."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.masters = {each: nn.Parameter(each.detach().float()) for each in self.parameters}
        mastered = [{**g, "params": [self.masters[each] for each in g["params"]]} for g in groups]
        super().__init__(mastered, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Widen the gradients, update the masters, round them into the parameters."""
        for parameter, master in self.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        loss = super().step(closure)
        for parameter, master in self.masters.items():
            parameter.copy_(master)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Those of the parameters: masters get theirs in step()."""
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None


def state_of(optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, Fields]:
    """What it keeps of each parameter, whichever optimizer it is."""
    if isinstance(optimizer, MasterAdamW):
        return {
            parameter: {**optimizer.state[master], "master": master}
            for parameter, master in optimizer.masters.items()
            if master in optimizer.state
        }
    if isinstance(optimizer, offload.AdamW):
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return {parameters[i]: kept for i, kept in optimizer.state_dict()["state"].items()}
    return optimizer.state


def recorded_step(optimizer: offload.AdamW) -> dict[str, Any]:
    """One update, and what it took: figures of the optimizer, of the kernel, and the timeline."""
    before, device, begin = optimizer.stats, device_bytes(), time.perf_counter()
    with optimizer.recorded() as events:
        optimizer.step()
    after, end = optimizer.stats, time.perf_counter()
    return {
        "seconds": end - begin,
        "device_bytes": device_bytes() - device,
        "compute_s": after.compute_s - before.compute_s,
        "hidden_s": after.hidden_s - before.hidden_s,
        "state_bytes": after.state_bytes,
        "buffer_bytes": after.cache_bytes + after.buffer_bytes,
        "paths": {
            now.path: now.read_bytes + now.written_bytes - then.read_bytes - then.written_bytes
            for now, then in zip(after.paths, before.paths, strict=True)
        },
        "events": [
            (event.kind, event.path, event.begin_s - begin, event.end_s - begin) for event in events
        ],
    }


def device_bytes() -> int:
    """What this process has read from devices and written to them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers["read_bytes"]) + int(numbers["write_bytes"])
