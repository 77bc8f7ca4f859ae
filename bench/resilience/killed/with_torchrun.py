"""One replica under torchrun and DDP, with a checkpoint of torch.save after every step.

torchrun ends all workers when one dies, and starts all of them again. They go on from the
checkpoint. A checkpoint after every step is the best case: no finished step is lost.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.resilience.killed.work import Order, Worker


class Checkpoint:
    def __init__(self, worker: Worker, folder: str) -> None:
        self._path = Path(folder, "checkpoint.pt")
        self._worker = worker

    def restore(self) -> int:
        """The step to go on with."""
        if not self._path.exists():
            return 0
        found = torch.load(self._path)
        self._worker.model.load_state_dict(found["model"])
        self._worker.optimizer.load_state_dict(found["optimizer"])
        return int(found["step"])

    def save(self, step: int) -> None:
        model, optimizer = self._worker.model, self._worker.optimizer
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._path)


def main() -> None:
    order = Order.given()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    worker = Worker(order, rank)
    checkpoint = Checkpoint(worker, order.folder)
    first = checkpoint.restore()
    ddp = DistributedDataParallel(worker.model)
    for step in range(first, order.until):
        for index in worker.share:
            is_last = index == worker.share[-1]
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                (worker.loss(step, index, ddp) / len(worker.share)).backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        worker.committed(step, worker.share)
        if rank == 0:
            checkpoint.save(step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
