"""Ctrl-C at each bytecode of the locks of the standard library that save(), drain() and a wait for
copies to another level take.

`python -m support.interrupted_conditions DIRECTORY` prints how many exceptions came. It hangs if
one of them left a lock taken: whoever starts it sets a deadline.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import statehold
from statehold.checkpoint.levels.promoting import Promoter
from statehold.checkpoint.save.pipeline import Pipeline
from support.faults import DEADLINE_S, SMALL
from support.inside import inside
from support.interrupts import Interrupts

LOCKS: list[Callable[..., Any]] = [
    threading.Condition.__enter__,
    threading.Semaphore.acquire,
    Pipeline.submit,
    Pipeline.drain,
    Promoter.start,
    Promoter.wait,
]


def main(run: str) -> None:
    levels = [statehold.Directory(keep=2), statehold.Directory(f"{run}-far", name="far", keep=2)]
    ckpt = statehold.Checkpointer(run, levels=levels, **SMALL)
    step = at = 0
    while True:
        step += 2
        interrupts = Interrupts(LOCKS, at)
        with interrupts.armed(), suppress(KeyboardInterrupt):
            ckpt.save(step, {"step": step})
            inside(ckpt).pipeline.drain()
            inside(ckpt).levels.promotions.wait(DEADLINE_S)
        if interrupts.fired is None:
            break
        inside(ckpt).pipeline.drain()
        ckpt.save(step + 1, {"step": step}).wait("committed")
        ckpt.flush(DEADLINE_S)
        assert ckpt.levels()[1].newest == step + 1
        at += 1
    ckpt.close()
    print(at)


if __name__ == "__main__":
    main(sys.argv[1])
