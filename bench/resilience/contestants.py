"""How replicas may sum their gradients: plain DDP, the fast sum, the exact one, or not at all.

Invariants: every contestant trains a model of its own, which begins with the same parameters, and
computes the same microbatches. After a step its p.grad is the mean of all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.resilience.model import Model
from statehold.resilience.sums.exact import ExactSum
from statehold.resilience.sums.fast import FastSum

BATCH = 4
NONE, DDP = "no reduction", "DDP"
VIEWS = "DDP, gradient_as_bucket_view"
FAST, LATE, EXACT = "fast", "fast, not watched", "exact"
CONTESTANTS = (NONE, DDP, VIEWS, FAST, LATE, EXACT)


class Contestant:
    """Trains with its own way to sum gradients; `spent` says how long its parts took."""

    announced_bytes = 0

    def __init__(self, name: str, model: Sequence[int], microbatches: int) -> None:
        self.name = name
        self.microbatches = microbatches
        self.model = Model(*model, batch=BATCH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.spent: dict[str, float] = {}

    def step(self, number: int, share: Sequence[int]) -> None:
        self.spent = {}
        self.optimizer.zero_grad()
        self.sum(number, share)
        self.optimizer.step()

    def sum(self, number: int, share: Sequence[int]) -> None:
        for index in share:
            self.model(number, index).div(self.microbatches).backward()

    def timed(self, name: str, act: Callable[..., Any], *args: Any) -> None:
        begin = time.perf_counter()
        act(*args)
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin


class WithDDP(Contestant):
    def __init__(self, name: str, model: Sequence[int], microbatches: int) -> None:
        super().__init__(name, model, microbatches)
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=name == VIEWS)

    def sum(self, number: int, share: Sequence[int]) -> None:
        replicas = dist.get_world_size()
        for index in share:
            is_last = index == share[-1]
            with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                (self._ddp(number, index) * (replicas / self.microbatches)).backward()


class WithSums(Contestant):
    def __init__(self, name: str, model: Sequence[int], microbatches: int) -> None:
        super().__init__(name, model, microbatches)
        kind = ExactSum if name == EXACT else FastSum
        self._sums = kind(self.model.named_parameters(), microbatches)

    def sum(self, number: int, share: Sequence[int]) -> None:
        sums = self._sums
        sums.begin()
        for index in share:
            sums.watch(start if index == share[-1] and self.name != LATE else None)
            loss = self.model(number, index)
            loss.backward()
            self.timed("count_s", sums.count, index, loss)
        self.timed("reduce_s", sums.reduce, start)
        sums.finish()

    @property
    def announced_bytes(self) -> int:  # type: ignore[override]
        return self._sums.announced_bytes


def start(tensor: Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def contestant(name: str, model: Sequence[int], microbatches: int) -> Contestant:
    kinds = {NONE: Contestant, DDP: WithDDP, VIEWS: WithDDP}
    return kinds.get(name, WithSums)(name, model, microbatches)
