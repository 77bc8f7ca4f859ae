"""Twins whose offloaded parameters are on an emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from statehold import offload
from support.cuda import Machine
from support.twins import Twins

SHAPES = [(3, 5000), (7,), (), (0, 4), (90_000,)]


class DeviceTwins(Twins):
    """Twins whose offloaded parameters are on a device, and get their gradients from autograd."""

    def __init__(self, machine: Machine, dtypes: Sequence[torch.dtype], **options: Any) -> None:
        self.machine = machine
        self.sums: dict[int, torch.Tensor] = {}
        shapes = options.pop("shapes", SHAPES)
        options = {"tiers": [offload.Host("8MiB")], "subgroup_bytes": 70_000} | options
        super().__init__(shapes, dtypes, place=machine.put, read=machine.read, **options)

    def backward(self, *, skip: Sequence[int] = (), scale: float = 1.0) -> None:
        for index, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            if index not in skip:
                grad = (self._noise(tuple(param.shape)) * scale).to(param.dtype)
                (param * self.machine.put(grad)).sum().backward()
                self.sums[index] = self.sums[index] + grad if index in self.sums else grad
                master.grad = self.sums[index].float()

    def step(self) -> None:
        super().step()
        self.sums.clear()
