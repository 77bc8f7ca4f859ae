"""A model and AdamW of any number of tensors, whose content follows from a seed.

Invariants: after `fill(seed)` every tensor is a function of the seed, so what a restore brought is
compared bit for bit without a second copy of the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Trained"]

TENSORS_EACH = 4  # of a parameter: itself, exp_avg, exp_avg_sq, step
BYTES_EACH = 12  # of an element: fp32, three times


class Trained:
    """What bench.peers saves: `model`, `optimizer`, `progress`."""

    def __init__(self, device: torch.device, tensors: int, nbytes: int, **options: Any) -> None:
        count = max(1, tensors // TENSORS_EACH)
        elements = max(2, nbytes // count // BYTES_EACH)
        options = {"fused": True} | options
        self.model = nn.ParameterList(
            nn.Parameter(torch.randn(elements, device=device)) for _ in range(count)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, **options)
        self.progress = {"step": 0}
        self.backward()
        self.optimizer.step()  # makes its state

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def backward(self) -> None:
        """Gradients for the next update, in memory that is kept."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(self.model.parameters()):
            found[f"{index}"] = parameter
            found |= {
                f"{index}.{key}": kept for key, kept in self.optimizer.state[parameter].items()
            }
        return found

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Give every tensor its content; no save may be under way."""
        draw = _Draw(seed)
        for tensor in self.tensors().values():
            draw.into(tensor)

    @torch.no_grad()
    def wipe(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()

    @torch.no_grad()
    def difference(self, seed: int) -> str:
        """The first tensor that does not have the content of `seed`; "" if all have it."""
        draw = _Draw(seed)
        for name, tensor in self.tensors().items():
            right = torch.empty_like(tensor)
            draw.into(right)
            if not torch.equal(tensor, right):
                return name
        return ""


class _Draw:
    """The content of one tensor after the other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def into(self, tensor: torch.Tensor) -> None:
        """A scalar is `step`, which has to stay a number of updates."""
        if tensor.dim() == 0:
            tensor.fill_(self._seed)
            return
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(self._seed)
            self._generators[tensor.device] = generator
        tensor.uniform_(generator=generator)
