"""Loops over steps that the program leaves in their middle, and enters again (R16)."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resilience.jobs import DEADLINE_S, UNTIL, Job, Log, coordinated, replica
from resilience.replica import (
    BATCH,
    LEASE_S,
    MAX_NORM,
    MICROBATCHES,
    SAMPLES,
    SEED,
    data,
    model_of,
)
from resilience.replica import weights as checksum_of
from statehold import Checkpointer
from statehold.errors import (
    ChecksumError,
    ClosedError,
    ReplicaLostError,
    StateholdError,
    StorageError,
    UsageError,
)
from statehold.process.worker import Flag
from statehold.resilience import Microbatch, Replicas, Step
from statehold.resilience.groups import Groups
from statehold.resilience.protocol.comeback import Comeback
from statehold.resilience.protocol.messages import Fenced
from statehold.resilience.seat import Seat

LEFT = 3  # in this step
MOMENTS = ["forward", "backward", "log", "update", "end"]
NEWER = LEFT + 2  # a step that others have saved
NEWER_NAME = f"step-{NEWER:012d}"
DATA = "rank-00000-of-00001.safetensors"


class Interrupted(Exception):
    """What brings the program out of its loop."""


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise Interrupted


class Program:
    """The loop of the documents, which is left once."""

    def __init__(self, replicas: Replicas, moment: str) -> None:
        self.replicas = replicas
        self.model, self.optimizer = replicas.state["model"], replicas.state["optimizer"]
        self.moment = moment
        self.losses: dict[int, str] = {}

    def leaves(self, moment: str) -> None:
        if self.is_due(moment):
            raise Interrupted

    def is_due(self, moment: str) -> bool:
        is_due = moment == self.moment and self.replicas.state["replicas"].step == LEFT
        self.moment = "" if is_due else self.moment
        return is_due

    def run(self) -> None:
        for step in self.replicas.steps(UNTIL):
            self.body(step)

    def body(self, step: Step) -> None:
        for microbatch in step:
            self.compute(microbatch)
        self.leaves("log")
        step.clip_grad_norm(MAX_NORM)
        if self.is_due("update"):
            with torch.no_grad():  # a half of it
                next(iter(self.model.parameters())).add_(1.0)
            hook = self.optimizer.register_step_pre_hook(self.interrupt)
            try:
                self.optimizer.step()
            finally:
                hook.remove()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not step.is_over:
            self.losses[step.number] = step.loss.hex()
        if self.moment == "end" and step.number == LEFT:
            self.moment = ""
            raise Interrupted

    def compute(self, microbatch: Microbatch) -> None:
        x = data()[microbatch.samples]
        is_second = len(self.losses) == LEFT and microbatch.index > 1
        loss = nn.functional.mse_loss(self.model(x), x)
        if is_second:
            self.leaves("forward")
            loss = Raising.apply(loss) if self.is_due("backward") else loss
        microbatch.backward(loss)

    @staticmethod
    def interrupt(*_: object) -> None:
        raise Interrupted


@pytest.mark.thorough
@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_others_go_on_and_who_enters_again_joins_them(
    tmp_path: Path, alone: Log, moment: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never trains on weights that miss an update."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # Jobs have none
    go, options = tmp_path / "go", (("reduction", reduction),)
    with (
        coordinated(2) as meeting,
        Job(tmp_path, meeting, UNTIL, hold=(UNTIL - 4, go), options=options) as job,
        replica(meeting.address, lease_s=LEASE_S, reduction=reduction) as left,
    ):
        job.start()
        program = Program(left, moment)
        with pytest.raises(Interrupted):
            program.run()
        job.logged(0, steps=UNTIL - 4)

        def let_go() -> None:
            meeting.wait_for("has connected", times=3)
            go.touch()

        thread = threading.Thread(target=let_go)
        thread.start()
        program.run()
        thread.join()
        log = job.wait()[0]
    assert checksum_of(program.model) == log.weights
    assert UNTIL - 1 in program.losses
    assert all(log.losses[step] == loss for step, loss in program.losses.items())
    if reduction == "exact":
        assert (log.losses, log.weights) == (alone.losses, alone.weights)


@pytest.mark.thorough
@pytest.mark.parametrize("moment", MOMENTS)
def test_who_is_alone_goes_on_with_what_it_has(tmp_path: Path, alone: Log, moment: str) -> None:
    """A step whose update is missing is taken again. Of an update in parts nothing is left."""
    with coordinated(1) as meeting, replica(meeting.address) as left:
        program = Program(left, moment)
        with pytest.raises(Interrupted):
            program.run()
        if moment == "update":
            with pytest.raises(ReplicaLostError) as lost:
                program.run()
            assert lost.value.facts["state"] == "parts of two steps"
            return
        program.run()
    assert program.losses == alone.losses
    assert checksum_of(program.model) == alone.weights


@pytest.mark.thorough
def test_an_update_in_parts_is_replaced_by_the_newest_saved_step(
    tmp_path: Path, alone: Log
) -> None:
    with (
        coordinated(1) as meeting,
        Checkpointer(tmp_path) as ckpt,
        replica(meeting.address, checkpointer=ckpt) as left,
    ):
        program = Program(left, "update")
        with pytest.raises(Interrupted):
            program.run()
        assert ckpt.steps()[-1] == LEFT
        program.run()
    assert program.losses == alone.losses
    assert checksum_of(program.model) == alone.weights


class Many:
    """A body that updates more than one thing, and is left once between two of its updates."""

    def __init__(self, address: str, checkpointer: Checkpointer | None = None) -> None:
        self.replicas = several(address, checkpointer)
        self.losses: dict[int, str] = {}
        state = self.replicas.state
        self.updates: list[Callable[[], object]] = [
            state["optimizer"].step,
            state["more"]["second"].step,
            state["scheduler"].step,
            lambda: state["mean"].update_parameters(state["model"]),
        ]

    def run(self, until: int, leave: int | None = None) -> None:
        for step in self.replicas.steps(until):
            for microbatch in step:
                x = data()[microbatch.samples]
                microbatch.backward(nn.functional.mse_loss(self.replicas.state["model"](x), x))
            self.losses[step.number] = step.loss.hex()
            for index, update in enumerate(self.updates):
                if (step.number, index) == (LEFT, leave):
                    raise Interrupted
                update()
            if leave == len(self.updates) and step.number == LEFT:
                break

    @property
    def end(self) -> tuple[dict[int, str], int, float]:
        state = self.replicas.state
        rate = state["optimizer"].param_groups[0]["lr"]
        return self.losses, checksum_of(state["mean"].module), rate


def several(address: str, checkpointer: Checkpointer | None) -> Replicas:
    model = model_of()
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW([first], lr=1e-2)
    mean = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return Replicas(
        model, optimizer, microbatches=MICROBATCHES, samples=SAMPLES, batch=BATCH, seed=SEED,
        coordinator=address, checkpointer=checkpointer,
        state={"more": {"second": torch.optim.AdamW(rest)}, "scheduler": scheduler, "mean": mean},
    )  # fmt: skip


@pytest.mark.parametrize("damaged", [DATA, "steps", "restore"])
def test_a_restore_that_is_cut_off_leaves_no_state_of_any_step(
    tmp_path: Path, whole: Path, alone: Log, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that was out finds a newer step, which cannot be read. If nothing of it is in the
    state, the replica goes on with what it has, else only with a step that it has restored."""
    run, end = tmp_path / "run", Seat.end_epoch
    saved = run / NEWER_NAME

    def fence(seat: Seat) -> None:
        end(seat)
        if seat.member.step == LEFT:
            with seat.link.changed:
                seat.member.receive(Fenced("its lease has ended"))

    def others_have_saved(*_: object) -> float:
        shutil.rmtree(run)
        shutil.copytree(whole / NEWER_NAME, saved)
        if damaged == DATA:
            flip(saved / DATA)
        else:
            patch.setattr(Checkpointer, damaged, unreachable)
        return 0.0

    def unreachable(*_: object) -> None:
        raise StorageError("cannot list the steps", errno=errno.ESTALE, path=str(run))

    with (
        coordinated(1) as meeting,
        Checkpointer(run, keep=1) as ckpt,
        replica(meeting.address, checkpointer=ckpt) as left,
    ):
        program = Program(left, "")
        with monkeypatch.context() as patch:
            patch.setattr(Seat, "end_epoch", fence)
            patch.setattr(Comeback, "pause", others_have_saved)
            with pytest.raises(StateholdError) as cut:
                program.run()
        assert ("the state" in cut.value.facts) is (damaged == DATA)
        if damaged == DATA:
            with pytest.raises(ChecksumError):
                program.run()
            flip(saved / DATA)
        program.run()
    skipped = range(LEFT, NEWER) if damaged == DATA else ()
    assert program.losses == {n: loss for n, loss in alone.losses.items() if n not in skipped}
    assert checksum_of(program.model) == alone.weights


def test_a_first_restore_that_is_cut_off_leaves_no_state_of_a_new_run(
    tmp_path: Path, whole: Path
) -> None:
    shutil.copytree(whole / NEWER_NAME, tmp_path / NEWER_NAME)
    flip(tmp_path / NEWER_NAME / DATA)
    with (
        coordinated(1) as meeting,
        Checkpointer(tmp_path) as ckpt,
        replica(meeting.address, checkpointer=ckpt) as late,
    ):
        program, new = Program(late, ""), checksum_of(late.state["model"])
        with pytest.raises(ChecksumError):
            program.run()
        assert checksum_of(program.model) != new
        shutil.rmtree(tmp_path / NEWER_NAME)
        with pytest.raises(ReplicaLostError) as lost:
            program.run()
    assert lost.value.facts["state"] == "parts of two steps"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run of all steps."""
    run = tmp_path / "whole"
    with (
        coordinated(1) as meeting,
        Checkpointer(run) as ckpt,
        replica(meeting.address, checkpointer=ckpt) as left,
    ):
        Program(left, "").run()
    return run


def flip(path: Path) -> None:
    """A bit near the end; again: as it was."""
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)


@pytest.mark.thorough
@pytest.mark.parametrize("leave", range(5))
def test_a_body_that_is_left_between_two_updates_leaves_no_state_of_any_step(
    tmp_path: Path, leave: int
) -> None:
    """R16: before all updates the step is taken again, after all of them the next one is. Between
    them the newest saved step is restored, and without one nobody trains on."""
    with coordinated(1) as meeting:
        whole = Many(meeting.address)
        with whole.replicas:
            whole.run(UNTIL)
    is_between = 0 < leave < 4
    for has_saved in (True, False) if is_between else (False,):
        with coordinated(1) as meeting, Checkpointer(tmp_path / "run") as ckpt:
            left = Many(meeting.address, ckpt if has_saved else None)
            with left.replicas:
                with contextlib.suppress(Interrupted):
                    left.run(UNTIL, leave)
                assert max(left.losses) == LEFT
                if is_between and not has_saved:
                    with pytest.raises(ReplicaLostError) as lost:
                        left.run(UNTIL)
                    assert lost.value.facts["state"] == "parts of two steps"
                else:
                    left.run(UNTIL)
                    assert left.end == whole.end


def test_iterators_of_a_loop_that_was_left_are_refused(alone: Log) -> None:
    with coordinated(1) as meeting, replica(meeting.address) as left:
        program = Program(left, "")
        steps = left.steps(UNTIL)
        program.body(next(steps))
        step = next(steps)
        microbatches = iter(step)
        microbatch = next(microbatches)
        program.losses = {}
        program.run()
        loss = program.model(data()[:1]).sum()
        with pytest.raises(UsageError, match="was left"):
            microbatch.backward(loss)
        with pytest.raises(UsageError):
            next(microbatches)
        with pytest.raises(UsageError, match="left before its end"):
            next(steps)
    assert program.losses == {step: loss for step, loss in alone.losses.items() if step}
    with pytest.raises(ClosedError):
        next(left.steps(UNTIL))


def test_a_loop_goes_on_neither_after_a_step_without_an_end_nor_after_half_an_update() -> None:
    for moment in ("forward", "update"):
        with coordinated(1) as meeting, replica(meeting.address) as left:
            program = Program(left, moment)
            with pytest.raises(UsageError) as refused:  # noqa: PT012
                for step in left.steps(UNTIL):
                    try:
                        program.body(step)
                    except Interrupted:
                        continue
            assert "enter steps() again" in str(refused.value.hint)


def test_who_leaves_every_step_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: each time it costs the others an epoch. To leave after an update costs no pause."""
    pauses: list[float] = []
    real = Comeback.pause

    def pause(comeback: Comeback, now: float) -> float:
        pauses.append(real(comeback, now))
        return 0.0

    monkeypatch.setattr(Comeback, "pause", pause)
    with coordinated(1) as meeting, replica(meeting.address) as left:
        for _ in range(3):
            steps = left.steps(UNTIL)
            next(iter(next(steps)))
        assert pauses == [0.0, 1.0]
        for _ in range(2):
            program = Program(left, "")
            for step in left.steps(UNTIL):
                program.body(step)
                break
        assert pauses == [0.0, 1.0, 2.0]


def test_groups_whose_building_ctrl_c_has_interrupted_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each Ctrl-C left a thread there, and its connections."""
    original, found = Flag.wait, list[Groups]()

    def interrupted(flag: Flag, timeout: float | None = None) -> bool:
        frame = sys._getframe(1)
        if frame.f_code is Groups.__init__.__code__:
            found.append(frame.f_locals["self"])
            raise KeyboardInterrupt
        return original(flag, timeout)

    monkeypatch.setattr(Flag, "wait", interrupted)
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        with pytest.raises(KeyboardInterrupt):
            Program(replicas, "").run()
        assert [each.join(DEADLINE_S) for each in found] == [True]
