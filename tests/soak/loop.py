"""The loop of the soak, and what it measures. The everyday suite runs it for seconds."""

from __future__ import annotations

import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold._core import open_fs
from statehold.errors import StateholdError
from support.faults import DEADLINE_S, SMALL, must
from support.ranks import Ranks

KEEP = 2
WARM_ROUNDS = 8
# What the allocator may keep or give back between two looks; a leak of 1 KiB a save shows in hours.
SLACK_BYTES = 24 << 20
ELEMENTS = 400_000


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    rss_bytes: int
    descriptors: int
    threads: int

    @staticmethod
    def now() -> Usage:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tasks = len(os.listdir("/proc/self/task"))
        found = len(os.listdir("/proc/self/fd"))
        return Usage(pages * os.sysconf("SC_PAGE_SIZE"), found, tasks)


class Soak:
    """Rounds of saves and restores below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0

    def run(self, seconds: float, tell: Callable[[str], object] = lambda _: None) -> str:
        """Rounds for so long; raises AssertionError as soon as something has grown."""
        until, rounds, first = time.monotonic() + seconds, 0, None
        while time.monotonic() < until or rounds <= 2 * WARM_ROUNDS:
            self.round()
            rounds += 1
            if rounds < WARM_ROUNDS:
                continue
            usage = Usage.now()
            first = first or usage
            must(usage.rss_bytes < first.rss_bytes + SLACK_BYTES, f"memory: {first} -> {usage}")
            must(usage.descriptors == first.descriptors, f"descriptors: {first} -> {usage}")
            must(usage.threads == first.threads, f"threads: {first} -> {usage}")
            if rounds % 200 == 0:
                tell(f"{rounds} rounds, {self.step} steps: {usage}")
        return f"{rounds} rounds, {self.step} steps: {first} at the start, {Usage.now()} at the end"

    def round(self) -> None:
        """One job of one rank that ends, and one of two."""
        self.alone(self.folder / "alone")
        self.together(self.folder / "together")

    def state(self) -> dict[str, Any]:
        return {"w": torch.full((ELEMENTS,), float(self.step)), "step": self.step, "x": [1, (2,)]}

    def alone(self, run: Path) -> None:
        live = self.state()
        with statehold.Checkpointer(run, keep=KEEP, **SMALL) as ckpt:
            for _ in range(3):
                self.step += 1
                ckpt.save(self.step, self.state()).wait("committed", DEADLINE_S)
            must(ckpt.restore(live) == self.step)
            must(bool(live["w"].eq(float(self.step)).all()))
            with pytest.raises(StateholdError):
                ckpt.restore({"w": torch.zeros(1)})
            self.damage(run)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                must(ckpt.restore(live) == self.step - 1)
        for aside in run.glob("*.corrupt"):  # kept for a person
            shutil.rmtree(aside)

    def damage(self, run: Path) -> None:
        path = run / f"step-{self.step:012d}" / "rank-00000-of-00001.safetensors"
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xaa")

    def together(self, run: Path) -> None:
        fs = open_fs("auto", 32)
        try:
            with Ranks(fs, 2, str(run), keep=KEEP) as ranks:
                for _ in range(2):
                    self.step += 1
                    ranks.save(self.step, lambda rank: self.state())
                live = [self.state() for _ in range(2)]
                must(ranks.each(lambda rank: ranks.ckpts[rank].restore(live[rank]))[1] == self.step)
        finally:
            fs.close()
