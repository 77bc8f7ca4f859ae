"""A subscriber beside a trainer that overwrites, is killed, and whose files are damaged.

Every update is one whole step, and nothing changes before apply().

STATEHOLD_UPDATES=2000 takes so many updates. Prints its seed, and how often each fault came.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import ChecksumError
from statehold.steps.nearest import Nearest, Next
from statehold.subscription.preparing import Move
from statehold.subscription.spare import Locate, Spare
from support import scripts
from support.faults import DEADLINE_S
from support.published import content, flip_in, whole
from support.seeds import SEED

UPDATES = int(os.environ.get("STATEHOLD_UPDATES", "12"))
FAULTS = ("killed", "damaged", "retired")


class Trainer:
    """A writer in a process of its own, which can be killed and started again."""

    def __init__(self, run: Path, memory: Path) -> None:
        self._words = [str(Path(__file__).parent / "writer.py"), str(run), str(memory)]
        self._lives = 0
        self._said = threading.Condition()
        self._newest = 0
        self._start()

    def _start(self) -> None:
        self._lives += 1
        paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        self._script = scripts.start(
            [*self._words, str(self._lives)],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=scripts.PIPE,
            stderr=scripts.PIPE,
        )
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._script.stdout is not None
        for line in self._script.stdout:
            with self._said:
                self._newest = max(self._newest, int(line.split()[0]))
                self._said.notify_all()

    def wait_beyond(self, step: int) -> None:
        """Return once a step after `step` is committed."""
        with self._said:
            assert self._said.wait_for(lambda: self._newest > step, DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL, and another life."""
        self.end()
        self._start()

    def end(self) -> None:
        assert self._script.poll() is None, self._script.stderr and self._script.stderr.read()
        self._script.kill()
        self._script.wait(DEADLINE_S)
        self._listener.join()
        for stream in (self._script.stdout, self._script.stderr):
            if stream is not None:
                stream.close()


class Faults:
    """Stands before every read of an update."""

    def __init__(self, trainer: Trainer, chance: random.Random, count: collections.Counter[str]):
        self._trainer, self._chance, self.count = trainer, chance, count
        self._read = Spare.read

    def read(
        self, spare: Spare, moves: Sequence[Move], locate: Locate, device: torch.device | None
    ) -> list[int]:
        fault = self._chance.choice([*FAULTS[1:], None, None])
        if not moves or fault is None:
            return self._read(spare, moves, locate, device)
        path = Path(locate(moves[0].piece.file, moves[0].piece.file_bytes))
        step = int(path.parent.name[5:17])
        if fault == "retired":
            self._trainer.wait_beyond(step + 1)
            return self._read(spare, moves, locate, device)
        return self._damaged(path, spare, moves, locate)

    def _damaged(
        self, path: Path, spare: Spare, moves: Sequence[Move], locate: Locate
    ) -> list[int]:
        piece = self._chance.choice(moves).piece
        at = self._chance.randrange(piece.begin, piece.end)
        with contextlib.ExitStack() as opened:
            with contextlib.suppress(FileNotFoundError):  # it was retired just now
                # The trainer does not overwrite a file that is open.
                file = opened.enter_context(open(path, "r+b"))
                flip_in(file, at)
                opened.callback(flip_in, file, at)
            try:
                return self._read(spare, moves, locate, None)
            except ChecksumError:
                self.count["damaged"] += 1
                raise


@pytest.fixture
def trainer(memory: Path) -> Iterator[Trainer]:
    """Its run directory is in memory, too, which syncs fast."""
    trainer = Trainer(memory.with_name("run"), memory)
    yield trainer
    trainer.end()


@pytest.mark.thorough
def test_every_update_is_one_whole_step(
    memory: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, count = random.Random(SEED), collections.Counter[str]()
    faults, after = Faults(trainer, chance, count), Nearest.after

    def counted(nearest: Nearest, step: int, error: Exception) -> Next:
        following = after(nearest, step, error)
        count["retired"] += following is Next.AGAIN
        return following

    monkeypatch.setattr(Spare, "read", lambda *arguments: faults.read(*arguments))
    monkeypatch.setattr(Nearest, "after", counted)
    live: dict[str, Any] = {name: torch.zeros_like(each) for name, each in content(0).items()}
    values, updates_left, partial_updates = [], UPDATES, 0
    with statehold.subscribe(memory.with_name("run"), {"model": live}) as updates:
        while updates_left > 0 or not all(count[fault] for fault in FAULTS):
            update = updates.wait(DEADLINE_S)
            assert update is not None
            assert not values or whole(live) == values[-1], "changed before apply()"
            update.apply()
            values.append(whole(live))
            updates_left -= 1
            partial_updates += update.changed_bytes < sum(each.nbytes for each in live.values())
            if chance.random() < 0.15 or not (updates_left > 0 or count["killed"]):
                trainer.kill()
                count["killed"] += 1
    print(f"seed {SEED}: {len(values)} updates, {partial_updates} of a part; {dict(count)}")
    assert partial_updates > 0
    assert len(set(values)) > 1
