"""What a job with an offloaded optimizer saves and restores: each update of it is known beforehand.

A step has the number of the update that it holds, so it says itself what must be in it. The paths
of the optimizer lie beside the run on the disk that loses power, so steps share files with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  the first optimizer of a process would import it, for a second

from powerloss.content import Found, State
from statehold import Checkpointer, offload
from support.faults import must
from support.offload_trainer import SUBGROUP, Trainer

_PART, _WHOLE = 2 * SUBGROUP, "1MiB"  # of the state in host memory


class Offloaded:
    """paths: of the optimizer. Without any it has its state in memory, and changes nothing on the
    disk. has_host: it has some of its state there in any case."""

    def __init__(self, ckpt: Checkpointer, paths: Sequence[str], has_host: bool) -> None:
        for path in paths:
            os.makedirs(path, exist_ok=True)
        tiers: list[Any] = [offload.Path(path) for path in paths]
        if has_host or not paths:
            tiers.insert(0, offload.Host(_PART if paths else _WHOLE))
        self._paths = paths
        self._trainer = Trainer(lambda: ckpt, tiers)

    def state(self, _rank: int, step: int, serial: int) -> State:
        """The state after update `step`, which is this one or one that is still to come."""
        trainer = self._trainer
        must(step >= trainer.update, "a trainer goes back by a restore only")
        while trainer.update < step:
            trainer.train()
        return trainer.state | {"serial": serial}

    def restore(self, _rank: int, step: int | None) -> Found:
        """After another update, which must leave the files alone that steps have."""
        trainer = self._trainer
        if trainer.update and self._paths:
            trainer.train()
        restored = trainer.restore(step)
        wrong = trainer.wrong()
        return Found(restored, trainer.update, trainer.serial, [wrong] if wrong else [])

    def close(self) -> None:
        """Checks that no file of this optimizer, or of one before it, takes space any more."""
        self._trainer.optimizer.close()
        left = [str(each) for path in self._paths for each in Path(path).rglob("*.state")]
        must(not left, left)
