"""A small training job whose steps go to a store, and the losses that it has when nothing happens.

The state has 13 MB, so that its file goes to the store in three parts.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import statehold
from support.faults import SMALL
from support.training import Training

WIDTH = 1024
SAVE_S = 60.0
STEPS = 8


@functools.cache
def undisturbed() -> tuple[float, ...]:
    """The losses of the steps from 1 on, without a Checkpointer."""
    training = Training(width=WIDTH)
    return tuple(training.step() for _ in range(STEPS))


class Job:
    """A job that may be begun again, at the same place or after its host was lost.

    url, port: where its store is. keep: how many steps stay there.
    """

    def __init__(self, run: Path, url: str, port: int, keep: int = 2) -> None:
        self.run = run
        self._store = statehold.ObjectStore(
            url, keep=keep, options={"endpoint": f"http://127.0.0.1:{port}"}
        )
        self.levels = [statehold.Directory(keep=2), self._store]

    def open(self) -> statehold.Checkpointer:
        return statehold.Checkpointer(self.run, levels=self.levels, **SMALL)

    def lose_host(self) -> None:
        """Only the store is left."""
        shutil.rmtree(self.run)

    def train(
        self,
        ckpt: statehold.Checkpointer,
        last: int,
        after: Callable[[int], None] = lambda step: None,
    ) -> int:
        """Go on from the newest step to `last`; returns that step, or 0.

        Each loss is compared with that of the undisturbed job.
        """
        training = Training(seed=1, width=WIDTH)  # other bits than those of the job
        begin = ckpt.restore(training.state)
        if begin is None:
            training = Training(width=WIDTH)
        first = begin or 0
        for step in range(first + 1, last + 1):
            training.step()
            ckpt.save(step, training.state).wait("committed", SAVE_S)
            after(step)
        assert tuple(training.losses) == undisturbed()[first:last]
        return first


def settled(ckpt: statehold.Checkpointer, step: int) -> bool:
    """Whether all levels have this step."""
    return [each.newest for each in ckpt.levels()] == [step, step]
