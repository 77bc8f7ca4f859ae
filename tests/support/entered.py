"""What of the package a steady save enters until it is over, and a restore after it.

`python -m support.entered DIRECTORY` prints JSON, of all threads together:
{"save": [[file, function], ...], "restore": [[file, function], ...]}.

What does not depend on the code is pinned. pread/pwrite move the bytes, because containers forbid
io_uring. The staging memory and the threads have a size, because those of hosts differ. A directory
in memory counts as one on a disk, because /tmp is the one or the other. What a save leaves for
after its commit belongs to it: otherwise the scheduler decides whose function that is. A process of
its own has no caches that another test has filled.
Lambdas and comprehensions do not count: the first import of a module enters them, and versions of
Python differ in which of them are functions.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import statehold
from statehold.io import memory_room
from support.inside import inside

PACKAGE = f"{Path(statehold.__file__).parent}/"
IO = statehold.Io(backend="threads", copy_threads=2, queue_depth=4, profile=None)
SAVES = 3  # from the third on, files and threads of earlier saves are there
Entered = set[tuple[str, str]]


class Watch:
    """Sees the calls of all threads that begin after it, and of its own."""

    def __init__(self) -> None:
        self._seen: Entered | None = None
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        seen, code = self._seen, frame.f_code
        if seen is None or event != "call" or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(PACKAGE):
            name = f"{code.co_name}:{code.co_firstlineno}"
            seen.add((code.co_filename.removeprefix(PACKAGE), name))

    def over(self, work: Callable[[], object]) -> Entered:
        self._seen = seen = set()
        work()
        self._seen = None
        return seen


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def entered(run: str) -> dict[str, Entered]:
    memory_room.is_memory = lambda _: False
    watch = Watch()
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": statehold.Rng()}
    with statehold.Checkpointer(run, keep=2, staging_bytes="64MiB", io=IO) as ckpt:

        def save() -> None:
            ckpt.save(step, state).wait("committed")
            inside(ckpt).pipeline.drain()

        for step in range(SAVES):  # noqa: B007
            train(model, optimizer)
            saved = watch.over(save)
        return {"save": saved, "restore": watch.over(lambda: ckpt.restore(state))}


def main(run: str) -> None:
    print(json.dumps({way: sorted(seen) for way, seen in entered(run).items()}))


if __name__ == "__main__":
    main(sys.argv[1])
