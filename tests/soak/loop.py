"""The loop of the soak. The everyday suite runs it for seconds.

A round is everything a run may meet: saves that are committed, retention, restores, a damaged
step, a save that fails at every operation in turn, a disk that is full, Checkpointers that come and
go (alone, beside another one, of two ranks), and one that stays open from the first round to the
last. After the warm-up a round may leave nothing behind: no memory, descriptor, thread or file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from soak.usage import Usage, settled
from statehold._core import open_fs
from statehold.errors import NoSpaceError, RunBusyError, StateholdError, StorageError, storage_error
from support.faults import DEADLINE_S, SMALL, must, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.ranks import Ranks
from support.training import Training

KEEP = 2
WARM_ROUNDS = 16  # every operation has failed once, the caches of threads are full
ELEMENTS = 400_000
TELL_S = 60.0
SIMULATED = ["mkdir", "open_write", "write", "sync", "sync_dir", "write_file", "rename"]
REFUSED = ["mkdir", "open_write", "write_file", "sync_dir", "rename"]  # what passes through Python


@contextlib.contextmanager
def unheard(logger: str) -> Iterator[None]:
    """Without the log: of failures that are wanted it says much, and pytest keeps what it says."""
    logging.getLogger(logger).disabled = True
    try:
        yield
    finally:
        logging.getLogger(logger).disabled = False


class Refusals:
    """Makes the next call of one operation on a step that is being written fail.

    Retention calls some of the same operations, at its own time; its failures fail no save.
    """

    def __init__(self, ckpt: statehold.Checkpointer) -> None:
        self.next: str | None = None
        spy_on(ckpt, self._before)

    def _before(self, operation: str, args: tuple[Any, ...]) -> None:
        if operation == self.next and ".partial" in args[0]:
            self.next = None
            raise storage_error(operation, errno.EIO, args[0])


class Soak:
    """Rounds of saves and restores below `folder`."""

    def __init__(self, folder: Path, warm_rounds: int = WARM_ROUNDS) -> None:
        self.folder = folder
        self.warm_rounds = warm_rounds
        self.step = 0
        self.rounds = 0
        self.saves = 0

    def run(self, seconds: float, tell: Callable[[str], object] = lambda _: None) -> str:
        """Rounds for so long; raises AssertionError as soon as something has grown."""
        self.lasting_training = Training()
        with (
            unheard("statehold"),
            statehold.Checkpointer(self.folder / "lasting", keep=KEEP, **SMALL) as ckpt,
        ):
            self.lasting_ckpt, self.refusals = ckpt, Refusals(ckpt)
            return self._run(seconds, tell)

    def _run(self, seconds: float, tell: Callable[[str], object]) -> str:
        began = told = time.monotonic()
        first: Usage | None = None
        while time.monotonic() < began + seconds or self.rounds <= 2 * self.warm_rounds:
            self.round()
            self.rounds += 1
            usage = settled(first) if first else Usage.now()
            growth = usage.growth_since(first) if first else ""
            must(not growth, f"grown after {self.rounds} rounds, {self.saves} saves: {growth}")
            if self.rounds == self.warm_rounds:
                first = usage
            if time.monotonic() >= told + TELL_S:
                told = time.monotonic()
                minutes = (told - began) / 60
                tell(f"{minutes:.0f} min, {self.rounds} rounds, {self.saves} saves: {usage}")
        return (
            f"{self.rounds} rounds, {self.saves} saves\n  began with {first}\n  ended with {usage}"
        )

    def round(self) -> None:
        """Everything once; of the operations that may fail, the next one."""
        self.alone(self.folder / "alone")
        self.together(self.folder / "together")
        self.failing(SIMULATED[self.rounds % len(SIMULATED)])
        self.full()
        self.lasting(REFUSED[self.rounds % len(REFUSED)])

    def save(self, ckpt: statehold.Checkpointer, state: dict[str, Any] | None = None) -> None:
        self.step += 1
        self.saves += 1
        ckpt.save(self.step, state or self.state()).wait("committed", DEADLINE_S)

    def state(self) -> dict[str, Any]:
        return {"w": torch.full((ELEMENTS,), float(self.step)), "step": self.step, "x": [1, (2,)]}

    def alone(self, run: Path) -> None:
        """Saves, retention, restores, a state that does not fit, a damaged step, a second user."""
        live = self.state()
        with statehold.Checkpointer(run, keep=KEEP, **SMALL) as ckpt:
            for _ in range(3):
                self.save(ckpt)
            must(ckpt.restore(live) == self.step)
            must(bool(live["w"].eq(float(self.step)).all()))
            with pytest.raises(StateholdError):
                ckpt.restore({"w": torch.zeros(1)})
            self.beside(run)
            self.damage(run)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                must(ckpt.restore(live) == self.step - 1)
        shutil.rmtree(run / f"step-{self.step:012d}.corrupt")  # kept for a person
        self.holds(run, [self.step - 1])

    def beside(self, run: Path) -> None:
        """Another Checkpointer may look at the run, and not save into it."""
        live = self.state()
        with statehold.Checkpointer(run, **SMALL) as second:
            must(second.restore(live) == self.step)
            with pytest.raises(RunBusyError):
                second.save(self.step + 1, live)

    def damage(self, run: Path) -> None:
        path = run / f"step-{self.step:012d}" / "rank-00000-of-00001.safetensors"
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xaa")

    def holds(self, run: Path, steps: list[int], besides: tuple[str, ...] = ()) -> None:
        """Nothing lies in the run directory but its lock and these steps."""
        expected = sorted([".lock", *besides, *(f"step-{step:012d}" for step in steps)])
        found = sorted(os.listdir(run))
        must(found == expected, f"files in {run}: expected {expected}, got {found}")

    def together(self, run: Path) -> None:
        """Two ranks: saves and restores."""
        fs = open_fs("auto", 32)
        try:
            with Ranks(fs, 2, str(run), keep=KEEP) as ranks:
                for _ in range(2):
                    self.step += 1
                    self.saves += 1
                    ranks.save(self.step, lambda rank: self.state())
                live = [self.state() for _ in range(2)]
                must(ranks.each(lambda rank: ranks.ckpts[rank].restore(live[rank]))[1] == self.step)
        finally:
            fs.close()
        self.holds(run, [self.step - 1, self.step])

    def failing(self, operation: str) -> None:
        """A save that fails natively or in Python, between two that do not."""
        fs = SimFs(seed=self.rounds)
        with checkpointer_on(fs, "/run", keep=KEEP, **SMALL) as ckpt:
            self.save(ckpt)
            fs.fail_next(operation, errno.EIO)
            with pytest.raises(StorageError):
                self.save(ckpt)
            must(fs.fired["injected"] == 1)
            self.save(ckpt)
        fs.close()

    def full(self) -> None:
        """A disk on which the second step has no room."""
        fs = SimFs(seed=self.rounds, capacity=5 * ELEMENTS)
        with checkpointer_on(fs, "/run", keep=KEEP, **SMALL) as ckpt:
            self.save(ckpt)
            with pytest.raises(NoSpaceError):
                self.save(ckpt)
        fs.close()

    def lasting(self, operation: str) -> None:
        """The Checkpointer that stays open: training steps, each saved, and a save that fails."""
        ckpt, training = self.lasting_ckpt, self.lasting_training
        for _ in range(3):
            training.backward()
            training.optimizer.step()
            self.save(ckpt, training.state)
        self.refusals.next = operation
        with pytest.raises(StorageError):
            self.save(ckpt, training.state)
        must(self.refusals.next is None, f"{operation} was not called")
        self.save(ckpt, training.state)
        must(ckpt.restore(training.state) == self.step)
        self.holds(self.folder / "lasting", ckpt.steps(), besides=(".spare",))
        must(len(ckpt.steps()) == KEEP)
