"""Asked to leave at random moments: in time, with a last step, and never with half of one.

STATEHOLD_LEAVES=1000 asks so many times.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold.errors import UsageError
from statehold.ranks.preemption import LATE, LEFT
from support import scripts
from support.seeds import SEED

LEAVES = int(os.environ.get("STATEHOLD_LEAVES", "12"))
ENOUGH_S = 60.0  # for a last save on a busy machine
SHORT_S = 1.0
# A busy machine may be late to end a process that ended itself in time: test_deadline has the exact
# moment. The campaign has the machine for itself.
LATE_S = 0.0 if "STATEHOLD_LEAVES" in os.environ else 60.0


class Victim:
    """Runs requests in the fork server, and holds them to what was promised before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest = 0
        victim = Path(__file__).with_name("victim.py")
        self._process = scripts.start([victim], stdin=scripts.PIPE, stdout=scripts.PIPE)

    def leave(
        self, body: str, number: signal.Signals, within_s: float, after_saves: int, delay_s: float
    ) -> tuple[int, float]:
        """Start, ask to leave so long after a save, and see: (exit code, seconds it took)."""
        order = {"run": str(self.folder / "run"), "within_s": within_s, "body": body,
                 "memory": str(self.folder / "memory") if after_saves % 2 else None}  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid, begin, saved = 0, 0.0, 0
        while True:
            event = self._next()
            pid = event.get("child", pid)
            if "restored" in event:
                assert event["restored"] >= self.newest, f"step {self.newest} was lost: {event}"
            saved += "saved" in event
            if begin == 0.0 and (saved == after_saves or (body != "train" and "ready" in event)):
                # Not a synchronisation: any moment is a good one to ask.
                signal.sigtimedwait([], delay_s)
                begin = time.monotonic()
                os.kill(pid, number)
            if "committed" in event:
                self.newest = event["committed"]
            if "exit" in event:
                return event["exit"], event["at"] - begin

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        event: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "wrong" not in event, event
        assert "error" not in event, event
        return event

    def steps(self) -> list[int]:
        """What is there afterwards, in the run directory; nothing half."""
        names = os.listdir(self.folder / "run")
        return sorted(
            int(name[5:]) for name in names if name.startswith("step-") and len(name) == 17
        )

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    victim = Victim(tmp_path)
    yield victim
    victim.close()


@pytest.mark.thorough
def test_leaving_at_random_moments(victim: Victim) -> None:
    chance = random.Random(SEED)
    print(f"seed {SEED}, {LEAVES} times")
    for _ in range(LEAVES):
        number = chance.choice([signal.SIGTERM, signal.SIGUSR1])
        after_saves, delay_s = chance.randint(1, 6), chance.random() * 0.05
        code, seconds = victim.leave("train", number, ENOUGH_S, after_saves, delay_s)
        assert code == LEFT
        assert seconds < ENOUGH_S
        # All levels have the last one: the run directory as well as the memory before it.
        assert victim.steps()[-1] > victim.newest
        victim.newest = victim.steps()[-1]


@pytest.mark.thorough
def test_whoever_saves_rarely_saves_when_asked(victim: Victim) -> None:
    code, seconds = victim.leave("rare", signal.SIGTERM, ENOUGH_S, 1, 0.02)
    assert code == LEFT
    assert seconds < ENOUGH_S
    assert len(victim.steps()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("body", ["deaf", "stuck"])
def test_the_deadline_holds_whatever_the_trainer_does(victim: Victim, body: str) -> None:
    victim.leave("rare", signal.SIGTERM, ENOUGH_S, 2, 0.0)
    before = victim.steps()
    code, seconds = victim.leave(body, signal.SIGTERM, SHORT_S, 2, 0.05)
    assert code == LATE
    assert 0.7 * SHORT_S < seconds < SHORT_S + LATE_S
    assert victim.steps() == before
    assert victim.leave("rare", signal.SIGTERM, ENOUGH_S, 2, 0.0)[0] == LEFT


def test_signals_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        assert not ckpt.is_leaving
        ckpt.leave_on(signal.SIGTERM, within_s=5)
        assert signal.getsignal(signal.SIGTERM) != before
        with (
            statehold.Checkpointer(tmp_path / "other") as other,
            pytest.raises(UsageError, match="already watches for signals"),
        ):
            other.leave_on(within_s=5)
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    "odd", [signal.SIGKILL, signal.SIGSTOP, signal.SIGRTMIN + 1, 0, "SIGTERM", [signal.SIGTERM]]
)
def test_a_signal_that_cannot_be_watched_changes_nothing(tmp_path: Path, odd: Any) -> None:
    """The others had a handler that did nothing from then on: no SIGTERM ended the process."""
    before = signal.getsignal(signal.SIGTERM)
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(UsageError, match="cannot watch for this signal") as caught:
            ckpt.leave_on(signal.SIGTERM, odd, within_s=5)
        assert "SIGTERM" in caught.value.facts["expected"]
        assert signal.getsignal(signal.SIGTERM) == before
        assert len(os.listdir("/proc/self/fd")) <= opened
        ckpt.leave_on(signal.SIGTERM, within_s=5)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_given_twice_is_given_back(tmp_path: Path) -> None:
    """Its own handler stayed, which did nothing any more."""
    before = signal.getsignal(signal.SIGTERM)
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.leave_on(signal.SIGTERM, signal.Signals(15), signal.SIGTERM, within_s=5)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpointer_that_was_dropped_watches_no_more(tmp_path: Path) -> None:
    """Nobody can close it."""
    before = signal.getsignal(signal.SIGTERM)
    dropped = statehold.Checkpointer(tmp_path / "run")
    dropped.leave_on(signal.SIGTERM, within_s=60)
    del dropped
    with statehold.Checkpointer(tmp_path / "other") as ckpt:
        ckpt.leave_on(signal.SIGTERM, within_s=60)
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_warning_after_the_end_is_written_nowhere(tmp_path: Path) -> None:
    """What tells of warnings may live longer than the training. The numbers of the pipe are those
    of other files by then."""
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.leave_on(signal.SIGTERM, within_s=60)
    files = [(tmp_path / f"{number}").open("wb") for number in range(64)]
    ckpt.leave()
    for file in files:
        file.close()
    assert {os.path.getsize(file.name) for file in files} == {0}
    assert not ckpt.is_leaving


def test_a_fork_is_not_watched(tmp_path: Path) -> None:
    """A data-loading worker that gets a SIGTERM ends, and its trainer goes on."""
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.leave_on(signal.SIGTERM, within_s=60)
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not ckpt.is_leaving


def test_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(UsageError):
        ckpt.leave_on(within_s=0)
