"""Jobs of runs that share files and descend from each other, on one simulated disk."""

from __future__ import annotations

from typing import Any

import torch

from support.faults import SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.plain_runs import BASE
from support.sharing import Tuned, TunedRun, whole_steps

Bits = dict[str, torch.Tensor]


class Job(TunedRun):
    """A job of a run, which restores first."""

    def __init__(
        self, fs: SimFs, run: str, layers: int = 4, *, is_loose: bool = False, **options: Any
    ) -> None:
        ckpt = checkpointer_on(fs, run, **{**SMALL, **options})
        super().__init__(ckpt, Tuned(layers), is_loose=is_loose)
        self.restored = ckpt.restore(self.state)
        self.written = 0  # bytes, by the newest save

    def linked(self, step: int) -> int:
        """Save; the bytes that the step has by second names."""
        stats = self.save(step).stats
        self.written = stats.written_bytes or 0
        return stats.linked_bytes or 0

    def end(self) -> dict[int, Bits]:
        self.ckpt.close()
        return self.expected


def begin(fs: SimFs, run: str = BASE, steps: int = 2, *, is_loose: bool = False) -> dict[int, Bits]:
    """A job that saves the first steps of a run."""
    job = Job(fs, run, is_loose=is_loose)
    for step in range(1, steps + 1):
        job.save(step)
    return job.end()


def check(fs: SimFs, run: str, expected: dict[int, Bits]) -> None:
    """The run has these steps."""
    with checkpointer_on(fs, run, **SMALL) as ckpt:
        must(whole_steps(ckpt, expected) == sorted(expected))
