"""A training whose every step is known: by plain AdamW here, on tiers in other processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from support.faults import must

FIELDS = ("master", "exp_avg", "exp_avg_sq")


def network() -> torch.nn.Module:
    """In 16 bit, with known weights."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(200, 300), torch.nn.Linear(300, 50)
    return torch.nn.Sequential(*layers).bfloat16()


def gradients(model: torch.nn.Module, step: int) -> None:
    """Those of a step, from data that depend on its number only."""
    data = torch.randn(4, 200, generator=torch.Generator().manual_seed(step)).bfloat16()
    model(data).float().square().mean().backward()


def digest(model: torch.nn.Module, state: Mapping[str, Any]) -> str:
    """Of all weights, and of all state that an update has made."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    for index, fields in sorted(state["state"].items()):
        found.update(f"{index} {float(fields['step'])}".encode())
        for name in FIELDS:
            found.update(fields[name].numpy().tobytes())
    return found.hexdigest()


class Plain:
    """torch's AdamW on float32 masters, as far as somebody has asked."""

    def __init__(self) -> None:
        self.model = network()
        self.masters = [each.detach().float() for each in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2, weight_decay=0.1, fused=True)
        self.digests = [self._digest()]

    def digest_after(self, steps: int) -> str:
        while len(self.digests) <= steps:
            self._step(len(self.digests))
        return self.digests[steps]

    def _step(self, number: int) -> None:
        gradients(self.model, number)
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            must(parameter.grad is not None)
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        self.digests.append(self._digest())

    def _digest(self) -> str:
        state = self.optimizer.state_dict()["state"]
        masters = dict(enumerate(self.masters))
        return digest(
            self.model,
            {"state": {i: {**fields, "master": masters[i]} for i, fields in state.items()}},
        )
