"""A rank of a job of SLURM. It finds the others through its environment, as torchrun's ranks do.

    train.py [MEMORY [alone]]   MEMORY: the folder of a level in memory, before the directory `run`;
                                alone: without an agent

It trains to step STEPS and saves each EVERY steps into `run`. At step HOLD it waits, once, until it
is asked to leave or the file `go` is there. It appends JSON lines to `told-RANK`: {"pid", "start"},
then {"step", "loss"} for each step, {"holding": step}. Rank 0 makes the file `done` at its end.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import statehold

STEPS, HOLD, EVERY = 24, 12, 5
WITHIN_S = 15.0  # below the cluster's grace times


class Training:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(1 + rank)  # each rank draws batches of its own
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "rng": statehold.Rng(),
        }  # fmt: skip

    def step(self) -> float:
        batch = torch.randn(16, 64)
        loss = nn.functional.mse_loss(self.model(batch), batch.roll(1, dims=1))
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            distributed.all_reduce(parameter.grad)
        self.optimizer.step()
        return loss.item()


def tell(**event: Any) -> None:
    with open(f"told-{os.environ['RANK']}", "a") as told:
        told.write(json.dumps(event) + "\n")


def hold(ckpt: statehold.Checkpointer, step: int) -> None:
    tell(holding=step)
    while not ckpt.is_leaving and not os.path.exists("go"):
        signal.sigtimedwait([], 0.01)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    training = Training(distributed.get_rank())
    levels: list[Any] | None = None
    if sys.argv[1:]:
        near = statehold.Memory(path=sys.argv[1], agent=not sys.argv[2:])
        levels = [near, statehold.Directory(every=1000)]
    with statehold.Checkpointer("run", levels=levels, staging_bytes="64MiB") as ckpt:
        ckpt.leave_on(within_s=WITHIN_S)
        start = ckpt.restore(training.state) or 0
        tell(pid=os.getpid(), start=start)
        for step in range(start + 1, STEPS + 1):
            if step == HOLD:
                hold(ckpt, step)
            tell(step=step, loss=training.step().hex())
            if step % EVERY == 0 or ckpt.is_last(step):
                ckpt.save(step, training.state)
    if distributed.get_rank() == 0:
        Path("done").touch()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
