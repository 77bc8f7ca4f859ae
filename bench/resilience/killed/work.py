"""What a replica does under every subject of bench.resilience.kill: its work, its log, its end.

Invariants: a microbatch is one sample, named by its step and index. The victim is killed once, by
SIGKILL, before the forward pass of the first or of the last microbatch of its share. Lines of the
log, as JSON: {"computes": [step, index]} before a forward pass, and {"step", "contributed", "at"}
after the optimizer's step, with the clock that all processes of a machine have in common.
Not here: how gradients are summed, and what follows a death (the other modules).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.resilience.model import Model

EARLY, LATE = "early", "late"


@dataclass(frozen=True)
class Order:
    """folder: of the logs. kill: the step in which the victim dies. until: a step not taken."""

    folder: str
    replicas: int
    microbatches: int
    layers: int
    features: int
    until: int
    kill: int
    victim: int
    moment: str
    coordinator: str = ""

    @classmethod
    def given(cls) -> Order:
        """The first word of the command line."""
        return cls(**json.loads(sys.argv[1]))

    def share(self, replica: int) -> range:
        """The microbatches of a replica while all replicas live."""
        each = self.microbatches // self.replicas
        return range(replica * each, (replica + 1) * each)


class Worker:
    """One replica: `loss` computes a microbatch, `committed` says what a step has contributed."""

    def __init__(self, order: Order, replica: int) -> None:
        torch.set_num_threads(1)
        self.order = order
        self.share = order.share(replica)
        self.model = Model(order.layers, order.features, batch=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._params = list(self.model.parameters())
        self._folder = Path(order.folder)
        self._log = (self._folder / f"replica{replica}").open("a", buffering=1)
        self._is_victim = replica == order.victim
        self._computed = 0

    def loss(self, step: int, index: int, forward: Any = None) -> Tensor:
        """forward: the model, or what wraps it."""
        self._die_if_told(step)
        self._say(computes=[step, index])
        self._computed += 1
        found: Tensor = (forward or self.model)(step, index)
        return found

    def gradients(self) -> Tensor:
        """A copy of all of them, in a row."""
        found = [each.grad.flatten() for each in self._params if each.grad is not None]
        return torch.cat(found)

    def set_gradients(self, flat: Tensor) -> None:
        parts = flat.split([each.numel() for each in self._params])
        for param, part in zip(self._params, parts, strict=True):
            param.grad = part.view_as(param)

    def committed(self, step: int, contributed: Sequence[int]) -> None:
        self._computed = 0
        self._say(step=step, contributed=list(contributed), at=time.monotonic())

    def _say(self, **line: Any) -> None:
        self._log.write(json.dumps(line) + "\n")

    def _die_if_told(self, step: int) -> None:
        order, killed = self.order, self._folder / "killed"
        position = 0 if order.moment == EARLY else len(self.share) - 1
        is_time = self._is_victim and step == order.kill and self._computed == position
        if is_time and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
