"""What a replica has and does where the size of its state counts, and the bytes of a transfer.

A trainer that waits stands for one whose work is on a device; a trainer that computes wants the
processor for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 1024
BYTES_PER_PARAMETER = 12  # a parameter and two moments in fp32


def state(nbytes: int, *, is_trained: bool) -> dict[str, Any]:
    torch.manual_seed(is_trained)
    layers = max(1, nbytes // BYTES_PER_PARAMETER // WIDTH**2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    if is_trained:
        for each in model.parameters():
            each.grad = torch.randn_like(each)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def wait(seconds: float) -> None:
    """Launch something on a device 500 times a second, and wait for it."""
    for _ in range(int(seconds * 500)):
        sum(range(2000))
        time.sleep(0.002)


def compute(seconds: float) -> None:
    """About so many seconds on a processor that nobody else wants."""
    matrix: Tensor = torch.ones(512, 512, device="cpu") / 512
    for _ in range(int(seconds * 150)):
        matrix = matrix @ matrix


WORK: dict[str, Callable[[float], None]] = {"waits": wait, "computes": compute}
