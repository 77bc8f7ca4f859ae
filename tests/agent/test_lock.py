"""Who may save into a run: one trainer, or an agent until a trainer asks for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from statehold.errors import RunBusyError
from statehold.steps import lock as locks
from statehold.steps.lock import RunLock
from support.faults import DEADLINE_S

# Holds the lock as an agent does; says so; ends when the lock is wanted, or when the test says so.
AGENT = """
import select, sys
from statehold.steps.lock import RunLock
lock = RunLock(sys.argv[1], yields=True)
print("held", flush=True)
while not lock.is_wanted and not select.select([sys.stdin], [], [], 0.01)[0]:
    pass
lock.release()
print("gone", flush=True)
"""

# Tries to get the lock when the test asks; says how that went; keeps it until the test ends it.
TRAINER = """
import sys
from statehold.errors import RunBusyError
from statehold.steps.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = RunLock(sys.argv[1])
    print("took over" if lock.took_over else "took", flush=True)
except RunBusyError:
    print("busy", flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(program: str, run: Path) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", program, str(run)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield started
    finally:
        started.communicate("\n\n", timeout=DEADLINE_S)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_an_agent_gives_the_run_up_to_a_trainer(tmp_path: Path) -> None:
    with process(AGENT, tmp_path) as agent:
        first = told(agent)
        assert first == "held"
        lock = RunLock(str(tmp_path))
        assert lock.took_over
        last = told(agent)
        assert last == "gone"
        with process(TRAINER, tmp_path) as other:
            told(other)
            go(other)
            assert told(other) == "busy"
        lock.release()


def test_an_agent_does_not_take_a_run_from_a_trainer(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path))
    refused = subprocess.run(
        [sys.executable, "-c", AGENT, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert "RunBusyError" in refused.stderr
    assert not lock.is_wanted
    lock.release()


def test_of_two_trainers_that_want_a_run_one_gets_it(tmp_path: Path) -> None:
    with process(AGENT, tmp_path) as agent:
        told(agent)
        with process(TRAINER, tmp_path) as one, process(TRAINER, tmp_path) as other:
            told(one), told(other)
            go(one), go(other)
            outcomes = sorted([told(one), told(other)])
        assert outcomes[0] == "busy"
        assert outcomes[1].startswith("took")
    lock = RunLock(str(tmp_path))  # the kernel has forgotten all of them
    assert not lock.took_over
    lock.release()


def test_an_agent_makes_room_for_a_later_one(tmp_path: Path) -> None:
    with process(AGENT, tmp_path) as older:
        told(older)
        with process(AGENT, tmp_path) as younger:
            assert told(younger) == "held"
            assert told(older) == "gone"


def test_an_agent_that_does_not_answer_is_waited_for_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "TAKE_OVER_S", 0.2)
    with process(AGENT.replace("lock.is_wanted", "False"), tmp_path) as agent:
        told(agent)
        with pytest.raises(RunBusyError, match="the agent of a dead trainer, process"):
            RunLock(str(tmp_path))


def test_an_agent_that_was_stopped_is_ended_for_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "TAKE_OVER_S", 1.0)
    with process(AGENT, tmp_path) as agent:
        first = told(agent)
        assert first == "held"
        os.kill(agent.pid, signal.SIGSTOP)
        lock = RunLock(str(tmp_path))
        assert lock.took_over
        ended = agent.wait(DEADLINE_S)
        assert ended == -signal.SIGKILL
        assert f"process {agent.pid}, was stopped" in caplog.text
        lock.release()


def test_a_trainer_that_was_stopped_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(locks, "TAKE_OVER_S", 0.3)
    with process(TRAINER, tmp_path) as trainer:
        ready = told(trainer)
        assert ready == "ready"
        go(trainer)
        got = told(trainer)
        assert got == "took"
        os.kill(trainer.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RunBusyError):
                RunLock(str(tmp_path))
            assert trainer.poll() is None
        finally:
            os.kill(trainer.pid, signal.SIGCONT)
