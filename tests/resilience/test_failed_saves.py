"""Saves that fail while replicas train (R17), and the state of one that is lost alone (R18)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from resilience.jobs import UNTIL, Job, coordinated, replica
from resilience.replica import data
from statehold import Checkpointer, Directory
from statehold.errors import (
    NoSpaceError,
    RunBusyError,
    StateholdError,
    StepOrderError,
    UnsupportedValueError,
)
from statehold.resilience.checkpoints import Checkpoints


class Handle:
    is_skipped = False

    def __init__(self, step: int) -> None:
        self.step = step
        self.has_ended = False
        self.error: StateholdError | None = None

    def done(self, _: str) -> bool:
        return self.has_ended and self.error is None

    def wait(self, _: str) -> Handle:
        if self.error is not None:
            raise self.error
        return self


class Failing:
    """Like a Checkpointer whose storage is full in some steps: the next call raises it."""

    def __init__(
        self,
        full: range,
        *,
        at_once: type[StateholdError] | None = None,
        every: int = 1,
        late: int = 0,
    ) -> None:
        self.saved: list[int] = []
        self._full, self._at_once, self._every, self._late = full, at_once, every, late
        self._begun: list[Handle] = []
        self._unraised: list[StateholdError] = []

    def steps(self) -> list[int]:
        return self.saved

    def save(self, step: int, state: Any, *, force: bool) -> Handle:
        for each in self._begun[: len(self._begun) - self._late]:
            self._end(each)
        if self._unraised:
            raise self._unraised.pop(0)
        handle = Handle(step)
        handle.is_skipped = step % self._every != 0 and not force
        if handle.is_skipped:
            return handle
        if step in self._full and self._at_once is not None:
            raise self._at_once("no")
        self._begun.append(handle)
        if not self._late:
            self._end(handle)
        return handle

    def _end(self, handle: Handle) -> None:
        self._begun.remove(handle)
        handle.has_ended = True
        if handle.step in self._full:
            handle.error = NoSpaceError(f"no space at {handle.step}", errno=28, path="/full")
            self._unraised.append(handle.error)
        else:
            self.saved.append(handle.step)


def checkpoints(failing: Failing) -> Checkpoints:
    return Checkpoints(cast(Any, failing), {}, lambda: None)


def test_a_failed_save_is_logged_and_each_due_step_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R17. From the second failure in a row on it is an error: the run must not be silent."""
    failing = Failing(range(3, 6))
    saving = checkpoints(failing)
    for step in range(1, 9):
        saving.save(step)
    assert failing.saved == [1, 2, 6, 7, 8]
    assert [each.levelno for each in caplog.records] == [logging.WARNING, *[logging.ERROR] * 2]
    assert [f"step {step} is not saved: no space" in caplog.text for step in range(1, 8)] == [
        step in {3, 4, 5} for step in range(1, 8)
    ]
    assert "3 saves in a row have failed" in caplog.text
    caplog.clear()
    failing._full = range(9, 10)
    saving.save(9)
    saving.save(10)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_each_failed_save_is_logged_with_its_own_step_and_cause(
    caplog: pytest.LogCaptureFixture, every: int, late: int
) -> None:
    """R17. Which steps are due, and how late a failure is known, changes no line."""
    failing = Failing(range(3, 10), every=every, late=late)
    saving = checkpoints(failing)
    for step in range(1, 25):
        saving.save(step)
    said = [each.getMessage().partition(" (")[0] for each in caplog.records]
    due = [step for step in range(3, 10) if step % every == 0]
    assert said == [f"statehold: step {step} is not saved: no space at {step}" for step in due]
    assert f"; {len(due)} saves in a row have failed" in caplog.messages[-1]
    assert 12 in failing.saved


@pytest.mark.parametrize("kind", [RunBusyError, StepOrderError])
def test_one_that_fails_at_once_is_logged_once(
    caplog: pytest.LogCaptureFixture, kind: type[StateholdError]
) -> None:
    saving = checkpoints(failing := Failing(range(2, 3), at_once=kind))
    for step in (1, 2, 3):
        saving.save(step)
    assert failing.saved == [1, 3]
    assert caplog.text.count("is not saved") == 1


def test_a_state_that_nobody_can_save_ends_the_loop() -> None:
    with pytest.raises(UnsupportedValueError):
        checkpoints(Failing(range(9), at_once=UnsupportedValueError)).save(1)


def test_what_is_kept_at_the_end_is_tried_though_a_save_before_has_failed() -> None:
    failing = Failing(range(1, 2))
    saving = checkpoints(failing)
    saving.save(1)
    assert saving.keep(2) is None
    assert failing.saved == [2]
    failing._full = range(3, 4)
    assert str(saving.keep(3)).startswith("no space at 3 (path: /full")


def test_a_storage_that_is_full_ends_no_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Checkpointer.save

    def save(ckpt: Checkpointer, step: int, *rest: Any, **named: Any) -> Any:
        if step in {2, 3}:
            raise NoSpaceError("no space", errno=28, path="/full")
        return real(ckpt, step, *rest, **named)

    monkeypatch.setattr(Checkpointer, "save", save)
    with (
        coordinated(1) as meeting,
        Checkpointer(tmp_path) as ckpt,
        replica(meeting.address, checkpointer=ckpt) as replicas,
    ):
        model, optimizer = replicas.state["model"], replicas.state["optimizer"]
        for step in replicas.steps(5):
            for microbatch in step:
                x = data()[microbatch.samples]
                microbatch.backward(nn.functional.mse_loss(model(x), x))
            optimizer.step()
            optimizer.zero_grad()
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1, 4, 5]


@pytest.mark.thorough
@pytest.mark.parametrize("has_others", [False, True])
def test_the_state_of_a_replica_that_is_lost_alone_is_saved(
    tmp_path: Path, has_others: bool
) -> None:
    """R18: its ranks hang for a while. Where others have the state, they save it."""
    go, run = tmp_path / "go", tmp_path / "run"
    order: dict[str, Any] = {"width": 2, "run": run, "every": 100, "pause_s": 0.01}
    with coordinated(1 + has_others) as meeting, Job(tmp_path, meeting, UNTIL, **order) as job:
        options = (("stuck_s", 1.0), ("lease_s", 1.0))
        job.start(hold=(6, go), options=options)
        if has_others:
            job.start()
        meeting.wait_for("the lease of its rank")
        go.touch()
        logs = job.wait()
    assert [log.errors for log in logs[:2]] == [["ReplicaLostError"]] * 2
    with Checkpointer(run, levels=[Directory()]) as ckpt:
        assert (6 in ckpt.steps()) != has_others
