"""A rank of a sharded replica takes the parts of the rank at its place in another replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.gloo import run_ranks

WORLD = 2


def _state(seed: int, steps: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8), nn.BatchNorm1d(8))
    for each in model[:2]:
        fully_shard(each)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _take_over(rank: int, world_size: int) -> list[bool]:
    from statehold.resilience.likeness import Likeness
    from statehold.resilience.state_bytes import Arriving, Offer

    among = (rank, world_size)
    held, joined = _state(1, 2), _state(2, 0)
    offer = Offer(held, among)
    like, other = Likeness(held, among), Likeness(joined, among)
    before = other.digest()
    arriving = Arriving(joined, offer.document, among)
    everything = torch.empty(offer.run.nbytes, dtype=torch.uint8)
    offer.run.read(0, everything)
    arriving.run.write(0, everything)
    arriving.finish()
    parameters = zip(held["model"].parameters(), joined["model"].parameters(), strict=True)
    return [
        before != like.digest(),
        other.digest() == like.digest(),
        all(torch.equal(one.to_local(), other.to_local()) for one, other in parameters),
    ]


def test_shards_and_the_state_of_their_optimizer_arrive(tmp_path: Path) -> None:
    assert run_ranks(_take_over, WORLD, tmp_path) == [[True] * 3] * WORLD
