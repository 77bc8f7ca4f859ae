"""Fewer replicas than can go on: what they hold is saved, and a state in parts is restored."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from resilience.jobs import UNTIL, Job, Log, assert_like, coordinated, replica
from resilience.replica import LEASE_S, MAX_NORM, data
from resilience.replica import weights as checksum_of
from statehold import Checkpointer, Directory, Save
from statehold.errors import NoSpaceError, WaitTimeout
from statehold.resilience import Replicas
from statehold.resilience.protocol.comeback import Comeback
from statehold.resilience.protocol.messages import Fenced
from statehold.resilience.seat import Seat

FEW: tuple[tuple[str, Any], ...] = (("min_replicas", 2),)


@pytest.mark.thorough
@pytest.mark.parametrize(("moment", "at"), [("sum", 5), ("after Vote", 6)])
def test_survivors_save_the_step_in_progress_before_they_give_up(
    tmp_path: Path, alone: Log, moment: str, at: int
) -> None:
    """The next start goes on from there: no step is lost, though only the first one was due."""
    run, again = tmp_path / "run", tmp_path / "again"
    order: dict[str, Any] = {"run": run, "every": 100}
    few: dict[str, Any] = {"options": FEW, "waits": (0.5,)}
    with coordinated(2) as meeting, Job(tmp_path, meeting, UNTIL, **few, **order) as job:
        job.start((5, moment))
        job.start()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [-signal.SIGKILL, 1]
    assert logs[1].errors == ["WaitTimeout"]
    with Checkpointer(run) as ckpt:
        assert ckpt.steps()[-1] == at
    again.mkdir()
    with coordinated(2) as meeting, Job(again, meeting, UNTIL, **order) as job:
        job.start()
        job.start()
        logs += job.wait()
    for log in logs:
        assert_like(log, alone)
    assert [sorted(log.losses) for log in logs] == [
        [*range(5)], [*range(at)], *[[*range(at, UNTIL)]] * 2
    ]  # fmt: skip
    assert logs[-1].weights == alone.weights


@pytest.mark.thorough
def test_the_ranks_of_a_survivor_save_together(tmp_path: Path) -> None:
    order: dict[str, Any] = {"run": tmp_path / "run", "every": 100, "width": 2, "options": FEW}
    order["waits"] = (0.5, 600.0)  # the first one to give up speaks for both
    with coordinated(2) as meeting, Job(tmp_path, meeting, UNTIL, **order) as job:
        job.start((5, "sum"))
        job.start()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [1, -signal.SIGKILL, 1, 1]
    assert [log.errors for log in logs[2:]] == [["WaitTimeout"]] * 2
    with Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps()[-1] == 5


@pytest.mark.thorough
@pytest.mark.parametrize("has_run", [True, False])
def test_a_joiner_with_a_state_in_parts_restores_the_newest_step(
    tmp_path: Path, alone: Log, has_run: bool
) -> None:
    """All that hold the state die while they send it. Without a saved step it has to end."""
    run = tmp_path / "run" if has_run else None
    with coordinated(1) as meeting, Job(tmp_path, meeting, UNTIL, run=run, pause_s=0.05) as job:
        job.start((0, "serving"))
        job.logged(0, steps=2)
        job.start()
        first, second = job.wait()
    assert [each.exitcode for each in job.processes] == [-signal.SIGKILL, 0 if has_run else 1]
    assert any("its ranks hold states of different steps" in event for event in meeting.events)
    if not has_run:
        assert (second.errors, second.losses) == (["ReplicaLostError"], {})
        return
    assert_like(second, alone)
    assert second.weights == alone.weights
    assert max(first.losses) <= min(second.losses) + 1  # the last save may not have been committed


@pytest.mark.thorough
def test_a_survivor_that_has_given_up_goes_on_if_it_enters_the_loop_again(
    tmp_path: Path, alone: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the newest state, and gives it to the one that comes."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # Jobs have none
    patient = (("min_replicas", 2), ("lease_s", LEASE_S))
    with (
        coordinated(2) as meeting,
        Job(tmp_path, meeting, UNTIL, options=patient) as job,
        replica(meeting.address, **dict(patient), wait_s=2.0) as survivor,
    ):
        job.start((3, "sum"))
        meeting.wait_for("has connected")
        losses: dict[int, str] = {}
        with pytest.raises(WaitTimeout) as late:
            train(survivor, UNTIL, losses=losses)
        assert late.value.facts["saved"] == "no: there is no checkpointer"
        job.start()
        train(survivor, UNTIL, losses=losses)
        job.wait()
    assert losses == alone.losses


@pytest.mark.thorough
def test_a_survivor_that_was_out_saves_its_state_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited under another name, as one that has just come, and gave up without a save."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # Jobs have none
    order: dict[str, Any] = {"run": tmp_path / "run", "every": 100}
    few = (("min_replicas", 2), ("lease_s", LEASE_S))
    with (
        coordinated(2) as meeting,
        Job(tmp_path, meeting, UNTIL, options=few, **order) as job,
        Checkpointer(tmp_path / "run", levels=[Directory(every=100)]) as ckpt,
        replica(meeting.address, checkpointer=ckpt, **dict(few), wait_s=2.0) as survivor,
    ):
        wait, waits = Seat.wait, []

        def waiting(seat: Seat, after: int) -> None:
            if after and not waits:  # the other one has died
                waits.append(after)
                with seat.link.changed:
                    seat.member.receive(Fenced("its lease has ended"))
            wait(seat, after)

        monkeypatch.setattr(Seat, "wait", waiting)
        job.start((3, "sum"))
        with pytest.raises(WaitTimeout) as late:
            train(survivor, UNTIL)
        assert waits
        assert late.value.facts["saved"] == "as step 3"
        assert ckpt.steps()[-1] == 3


@pytest.mark.thorough
def test_who_comes_back_after_the_others_takes_what_they_have_saved(
    tmp_path: Path, alone: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began a run of its own with its older state, and its first save was out of order."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # Jobs have none
    run = tmp_path / "run"
    with (
        coordinated(1) as meeting,
        Job(tmp_path, meeting, UNTIL, run=run, pause_s=0.05) as job,
        Checkpointer(run) as ckpt,
        replica(meeting.address, checkpointer=ckpt, lease_s=LEASE_S) as late,
    ):
        pauses, has_fenced = [], []

        def pause(_: Comeback, now: float) -> float:
            pauses.append(now)
            job.wait()
            return 0.0

        def end_epoch(seat: Seat) -> None:
            end(seat)
            if not has_fenced:
                has_fenced.append(seat)
                with seat.link.changed:
                    seat.member.receive(Fenced("its lease has ended"))

        end = Seat.end_epoch
        job.start()
        job.logged(0, steps=2)
        monkeypatch.setattr(Comeback, "pause", pause)
        monkeypatch.setattr(Seat, "end_epoch", end_epoch)
        losses = train(late, UNTIL)
        assert len(pauses) == 1
        assert losses == {step: alone.losses[step] for step in losses}
        assert max(losses) < UNTIL - 1
        assert checksum_of(late.state["model"]) == alone.weights


@pytest.mark.thorough
def test_what_could_not_be_saved_is_saved_when_the_loop_is_entered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica is no member any more, but nobody has a newer state."""
    save = Checkpointer.save

    def full(ckpt: Checkpointer, step: int, *rest: Any, force: bool = False) -> Save:
        if force:
            raise NoSpaceError("cannot allocate", errno=errno.ENOSPC, path="/full")
        return save(ckpt, step, *rest)

    few: dict[str, Any] = {"min_replicas": 2, "lease_s": LEASE_S}
    with (
        coordinated(2) as meeting,
        Checkpointer(tmp_path / "run", levels=[Directory(every=100)]) as ckpt,
        Checkpointer(tmp_path / "other", levels=[Directory(every=100)]) as others,
        replica(meeting.address, **few, checkpointer=others) as other,
        replica(meeting.address, **few, wait_s=0.5, checkpointer=ckpt) as survivor,
    ):
        thread = threading.Thread(target=desert, args=(other, 3))
        thread.start()
        meeting.wait_for("has connected")
        monkeypatch.setattr(Checkpointer, "save", full)
        with pytest.raises(WaitTimeout) as late:
            train(survivor, UNTIL)
        thread.join()
        assert late.value.facts["saved"].startswith("no: cannot allocate (path: /full, errno: EN")
        assert "enter steps() again" in str(late.value.hint)
        monkeypatch.setattr(Checkpointer, "save", save)
        with pytest.raises(WaitTimeout) as late:
            next(survivor.steps(UNTIL))
        at = ckpt.steps()[-1]
        assert late.value.facts["saved"] == f"as step {at}"
        assert late.value.facts["state"] == f"that of the beginning of step {at}, intact"
        assert at in {2, 3}  # it may not know yet that the other one has committed step 2


def desert(replicas: Replicas, step: int) -> None:
    """Train until the step, and end as one that is killed does."""
    train(replicas, UNTIL, last=step)
    replicas.close()


def train(
    replicas: Replicas,
    until: int,
    last: int | None = None,
    losses: dict[int, str] | None = None,
) -> dict[int, str]:
    """As the replicas of a Job do; returns the losses."""
    model, optimizer = replicas.state["model"], replicas.state["optimizer"]
    losses = {} if losses is None else losses
    for step in replicas.steps(until):
        if step.number == last:
            break
        for microbatch in step:
            x = data()[microbatch.samples]
            microbatch.backward(nn.functional.mse_loss(model(x), x))
        step.clip_grad_norm(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if not step.is_over:
            losses[step.number] = step.loss.hex()
    return losses


def test_who_has_given_up_may_join_again() -> None:
    """The loop is entered once more when there are enough."""
    with coordinated(2) as meeting, replica(meeting.address, min_replicas=2, wait_s=0.2) as lonely:
        with pytest.raises(WaitTimeout) as late:
            next(lonely.steps(1))
        assert late.value.facts["state"] == "that of the beginning of step 0, intact"
        assert "saved" not in late.value.facts  # it has never been a member
        with replica(meeting.address, min_replicas=2) as other:
            thread = threading.Thread(target=next, args=(other.steps(1),))
            thread.start()
            assert next(lonely.steps(1)).number == 0
            thread.join()


@pytest.mark.thorough
@pytest.mark.parametrize("has_run", [True, False])
def test_a_state_in_parts_is_never_taken_for_that_of_a_step(
    tmp_path: Path, has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that entered the loop again after WaitTimeout passed for one with its old step."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # Jobs have none
    run = tmp_path / "run" if has_run else None
    few: dict[str, Any] = {"min_replicas": 2, "wait_s": 0.5, "lease_s": LEASE_S}
    states = []
    with (
        contextlib.ExitStack() as stack,
        coordinated(1) as meeting,
        Job(tmp_path, meeting, UNTIL, run=run, pause_s=0.05) as job,
    ):
        job.start((0, "serving"))
        job.logged(0, steps=2)
        mine = stack.enter_context(Checkpointer(run)) if run else None
        joiner = stack.enter_context(replica(meeting.address, checkpointer=mine, **few))
        for _ in range(2):
            with pytest.raises(WaitTimeout) as late:
                train(joiner, UNTIL)
            states.append(late.value.facts["state"])
        saved = mine.steps()[-1] if mine else None
    torn = "parts of two steps, because a transfer has broken off"
    assert states[0] == torn
    assert states[1] == (f"that of the beginning of step {saved}, intact" if has_run else torn)
