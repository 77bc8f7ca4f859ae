"""Readers beside a writer that saves steps again, retires them, and gives the run up and takes it
again: every restore is one whole save, at least as new as what was there when it began.

A writer thread and a few readers; STATEHOLD_READERS=5000 makes so many restores, with the writer in
a process of its own. Prints its seed, and how often a reader had to begin again.
"""

from __future__ import annotations

import collections
import logging
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import statehold
from statehold.checkpoint.restore.call import Restorer, StepChanged
from statehold.errors import StateholdError
from support.faults import SMALL
from support.inside import inside
from support.seeds import SEED

RESTORES = int(os.environ.get("STATEHOLD_READERS", "60"))
IS_LONG = "STATEHOLD_READERS" in os.environ
READERS = 3
NUMEL = 50_000
LIMIT_S = 60.0 + RESTORES


def content(value: int) -> dict[str, object]:
    whole = {name: torch.full((NUMEL,), value, dtype=torch.int32) for name in "abc"}
    return {**whole, "value": value}


def write(run: Path, seed: int, goes_on: Callable[[], bool]) -> None:
    """Save each step a few times, and open the run anew now and then."""
    chance = random.Random(seed)
    step = value = 0
    while goes_on():
        with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
            for _ in range(chance.randrange(1, 5)):
                step += 1
                for _ in range(chance.randrange(1, 5)):
                    value += 1
                    ckpt.save(step, content(value)).wait("committed", LIMIT_S)


class Readers:
    """Restore in several threads until there were enough, and some had to begin again."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._guard = threading.Lock()
        self.done = 0
        self.wrong: collections.Counter[str] = collections.Counter()
        self.begun_again = 0
        self.until = time.monotonic() + LIMIT_S

    @property
    def has_enough(self) -> bool:
        enough = self.done >= RESTORES and self.begun_again > 0
        return enough or bool(self.wrong) or time.monotonic() > self.until

    def read(self) -> None:
        with statehold.Checkpointer(self._run, keep=2, **SMALL) as ckpt:
            while not self.has_enough:
                found = self._restored(ckpt)
                with self._guard:
                    self.done += 1
                    self.wrong.update(found)

    def _restored(self, ckpt: statehold.Checkpointer) -> Iterator[str]:
        """What is wrong with one restore."""
        live = content(0)
        try:
            newest = inside(ckpt).levels.store.newest() or 0
            got = ckpt.restore(live)
        except (StateholdError, RuntimeWarning) as error:
            return iter([f"{type(error).__name__}: {error}"])
        tensors = [live[name] for name in "abc"]
        values = {int(each) for tensor in tensors for each in torch.unique(tensor)}
        wrong = []
        if values != {live["value"]}:
            wrong.append(f"mixed: {values} and {live['value']}")
        if (got or 0) < newest:
            wrong.append(f"step {got} was restored, and {newest} was there before")
        return iter(wrong)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Path]:
    """A run into which somebody saves."""
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(0, content(0))
    if not IS_LONG:
        stopped = threading.Event()
        thread = threading.Thread(target=write, args=(run, SEED, lambda: not stopped.is_set()))
        thread.start()
        yield run
        stopped.set()
        thread.join()
        return
    program = (
        "import sys; from pathlib import Path; import test_reader_campaign as own; "
        "own.write(Path(sys.argv[1]), own.SEED, lambda: True)"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run)], env={**os.environ, "PYTHONPATH": paths}
    )
    yield run
    assert process.poll() is None, "the writer has ended"
    process.kill()
    process.wait()


def test_readers_beside_a_writer(
    writer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    readers = Readers(writer)
    restore = Restorer.step

    def counted(restorer: Restorer, step: int) -> object:
        try:
            return restore(restorer, step)
        except StepChanged:  # which begins the restore anew
            with readers._guard:
                readers.begun_again += 1
            raise

    monkeypatch.setattr(Restorer, "step", counted)
    with caplog.at_level(logging.WARNING, "statehold"), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        threads = [threading.Thread(target=readers.read) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"seed {SEED}: {readers.done} restores, begun again {readers.begun_again} times")
    assert dict(readers.wrong) == {}
    assert readers.done >= RESTORES
    assert readers.begun_again > 0
    bad = [name for name in os.listdir(writer) if name.endswith(".corrupt")]
    assert bad == []
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert not [text for text in told if "intact" in text or "damaged" in text]
