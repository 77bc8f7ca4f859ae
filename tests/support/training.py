"""A small training run for the tests: a model with a buffer and tied weights, an optimizer, data.

`bits(state)` flattens everything that a step must bring back into bytes, so that two states can be
compared exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import statehold


class Net(nn.Module):
    """Embedding tied to the output, a hidden layer, batch norm (a buffer that forward changes)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 64, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(torch.relu(self.hidden(self.embed(tokens)))))


class Training:
    """Everything a run needs; `state` is what the tests save."""

    def __init__(self, seed: int = 0, width: int = 32) -> None:
        torch.manual_seed(seed)
        self.model = Net(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.progress: dict[str, Any] = {"tokens": 0, "best": float("inf")}
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.progress,
            "rng": statehold.Rng(),
        }

    def backward(self) -> float:
        tokens = torch.randint(0, 64, (16,))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(tokens), tokens)
        loss.backward()
        self.progress["tokens"] += tokens.numel()
        self.progress["best"] = min(self.progress["best"], loss.item())
        return loss.item()

    def step(self) -> float:
        loss = self.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss)
        return loss


def bits(training: Training) -> dict[str, bytes]:
    """Every tensor of the training by name, as bytes."""
    tensors = dict(training.model.state_dict())
    for index, state in enumerate(training.optimizer.state.values()):
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    raw = {name: _bytes(tensor) for name, tensor in tensors.items()}
    raw["scheduler"] = repr(training.scheduler.state_dict()).encode()
    raw["progress"] = repr(training.progress).encode()
    raw["rng"] = _bytes(torch.get_rng_state())
    return raw


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
