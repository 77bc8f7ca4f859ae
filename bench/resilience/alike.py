"""What it costs to compare a state with that of other members: the digest of a ballot, and a step.

Invariants: a step is one microbatch and its update by AdamW, without any sum: a real one is longer.
Both are in processor seconds of one thread, because the machine may be busy.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from bench.resilience.contestants import BATCH
from bench.resilience.model import Model
from statehold.resilience.likeness import Likeness

Record = dict[str, Any]


def measure(given: Namespace) -> list[Record]:
    torch.set_num_threads(1)
    model = Model(given.layers, given.features, BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    like = Likeness({"model": model, "optimizer": optimizer, "scheduler": scheduler})

    def step(number: int) -> None:
        model(number, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    step(0)
    record: Record = {"turns": like.turns(), "step_s": [], "share_s": [], "all_s": []}
    record["bytes"] = 3 * sum(each.nbytes for each in model.parameters())
    for number in range(given.rounds):
        record["step_s"].append(_cpu_s(step, number))
        record["share_s"].append(_cpu_s(like.digest, number))
        record["all_s"].append(_cpu_s(like.digest, None))
    return [record]


def table(records: list[Record]) -> str:
    (record,) = records
    step_s, share_s, all_s = (statistics.median(record[f"{x}_s"]) for x in ("step", "share", "all"))
    return (
        f"{record['bytes'] / 1e9:.2f} GB of parameters and moments, in {record['turns']} turns\n"
        f"{'cpu s: step':>12} {'digest':>8} {'of the step':>12} {'digest of all bytes':>20}\n"
        f"{step_s:12.3f} {share_s:8.4f} {share_s / step_s:12.2%} {all_s:20.3f}"
    )


def _cpu_s(act: Callable[[Any], object], given: object) -> float:
    begin = time.process_time()
    act(given)
    return time.process_time() - begin
