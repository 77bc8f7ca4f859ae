"""An agent that is at work: a new trainer goes on at once, and nothing half is ever visible.

Agents are slowed down by the limit of their level, so that they are in the middle of a copy for as
long as a test takes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from support.agents import (
    NUMEL,
    Trainers,
    agents,
    check_intact,
    content,
    said,
    steps_in,
    wait_ended,
    wait_for,
    wait_no_agent,
    waiting,
)
from support.faults import DEADLINE_S, SMALL
from support.levels import settle

SLOW = {"every": 1000, "bytes_per_s": "16KiB"}
STOPPED = "stopped: a trainer has taken over the run"


def opened(trainers: Trainers) -> statehold.Checkpointer:
    levels = [statehold.Memory(path=trainers.memory), statehold.Directory(every=1000)]
    return statehold.Checkpointer(trainers.run, levels=levels, **SMALL)


def state(step: int = 0) -> dict[str, Any]:
    return {"w": content(step) if step else torch.zeros(NUMEL, dtype=torch.int32), "step": step}


def partials(run: Path) -> list[Path]:
    return list(run.glob("step-*.partial"))


def test_a_trainer_reads_beside_the_agent_and_takes_over(trainers: Trainers) -> None:
    trainers.killed(after=3, far=[SLOW])
    newest = steps_in(trainers.memory)[-1]
    agent = trainers.agent_at_work()
    with opened(trainers) as ckpt:
        live = state()
        restored = ckpt.restore(live)
        assert restored == newest
        assert torch.equal(live["w"], content(newest))
        assert partials(trainers.run), "the agent was not at work any more"
        assert newest not in steps_in(trainers.run)
        begin = time.monotonic()
        ckpt.save(newest + 1, state(newest + 1)).wait("committed", DEADLINE_S)
        waited_s = time.monotonic() - begin
        wait_ended(agent)
        assert STOPPED in said(trainers.run)
        # What the agent could not end is gone on with, though the level wants each 1000th step.
        settle(ckpt)
        assert steps_in(trainers.run)[-1] == newest
    print(f"the first save took {waited_s:.2f} s")
    check_intact(trainers.run, newest + 1)
    assert partials(trainers.run) == []
    trainers.newest = newest + 1


def test_an_agent_that_is_killed_leaves_nothing_half(trainers: Trainers) -> None:
    trainers.killed(after=3, far=[SLOW])
    newest, before = steps_in(trainers.memory)[-1], steps_in(trainers.run)
    agent = trainers.agent_at_work()
    os.kill(agent, signal.SIGKILL)
    wait_ended(agent)
    assert partials(trainers.run)
    assert steps_in(trainers.run) == before
    for step in before:
        check_intact(trainers.run, step)
    exits = trainers.trained(saves=1)  # checks what it restores
    assert exits == [0]
    assert trainers.restored == newest
    assert steps_in(trainers.run)[-1] == newest + 1
    assert partials(trainers.run) == []


def test_an_agent_ends_on_sigterm(trainers: Trainers) -> None:
    trainers.killed(after=2, far=[SLOW])
    agent = trainers.agent_at_work()
    os.kill(agent, signal.SIGTERM)
    wait_ended(agent)
    assert "stopped: by a signal" in said(trainers.run)
    exits = trainers.trained(saves=1)
    assert exits == [0]
    assert partials(trainers.run) == []


def test_an_agent_of_an_older_trainer_makes_room_for_the_next_one(trainers: Trainers) -> None:
    trainers.killed(after=2, far=[SLOW])
    first = trainers.agent_at_work()
    # Dies without having saved: there is one agent still, and it goes on.
    trainers.start(saves=0, then="stay", far=[SLOW])
    for event in trainers.events():
        if "staying" in event:
            os.kill(trainers.pids[0], signal.SIGKILL)
    assert trainers.agent_at_work() == first
    # Saves, and dies as well: its own agent brings its own step.
    trainers.killed(after=2, far=[{"every": 1000}])
    wait_no_agent(trainers.run)
    newest = steps_in(trainers.memory)[-1]
    assert STOPPED in said(trainers.run)
    assert steps_in(trainers.run)[-1] == newest
    check_intact(trainers.run, newest)


@pytest.mark.thorough
def test_a_level_that_fails_is_passed_over_and_named(trainers: Trainers, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blocked, other = str(tmp_path / "file" / "away"), str(tmp_path / "other")
    far = [{"path": blocked, "name": "blocked"}, {"path": other, "name": "other", "every": 1000}]
    trainers.killed(after=3, far=far, patience=[0.05, 3.0])
    wait_no_agent(trainers.run)
    newest = steps_in(trainers.memory)[-1]
    assert steps_in(tmp_path / "other")[-1] == newest
    assert "ended; the newest step did not reach: blocked" in said(trainers.run)
    assert said(trainers.run).count(f"copying step {newest} to level blocked") > 1


def test_a_step_that_is_damaged_is_passed_over(trainers: Trainers) -> None:
    trainers.start(saves=3, then="stay")
    for event in trainers.events():
        if "staying" in event:
            (data,) = (trainers.memory / "step-000000000003").glob("*.safetensors")
            with data.open("r+b") as file:
                file.seek(-5, os.SEEK_END)
                file.write(b"\xff")
            os.kill(trainers.pids[0], signal.SIGKILL)
    wait_no_agent(trainers.run)
    assert steps_in(trainers.run)[-1] == 2
    assert "xxh3-64" in said(trainers.run)
    assert said(trainers.run).endswith(": done\n")
    check_intact(trainers.run, 2)
    trainers.newest = 2


def test_a_level_that_another_job_saves_into(trainers: Trainers, tmp_path: Path) -> None:
    """It is left alone, and said so; nothing is tried again."""
    with statehold.Checkpointer(tmp_path / "other", **SMALL) as ckpt:
        ckpt.save(1, state(1)).wait("committed", DEADLINE_S)
        far = [{"path": str(tmp_path / "other"), "name": "other"}, {"every": 1000}]
        trainers.killed(after=2, far=far)
        wait_no_agent(trainers.run)
        assert "ended; the newest step did not reach: other" in said(trainers.run)
        assert "process" in said(trainers.run)
    assert steps_in(trainers.run)[-1] == steps_in(trainers.memory)[-1]
    assert steps_in(tmp_path / "other") == [1]


def test_an_agent_that_is_lost_is_replaced(trainers: Trainers) -> None:
    """At the next save; what it was to do is done by the other one."""
    last = None  # when this is committed, the other one has been told what to do
    trainers.start(saves=100_000)
    for event in trainers.events():
        step = event.get("committed")
        if step == 1:
            (lost,) = wait_for(lambda: waiting(trainers.run), "no agent waits")
            os.kill(lost, signal.SIGKILL)
            wait_ended(lost)
        elif step and last is None and agents(trainers.run):
            last = steps_in(trainers.memory)[-1] + 2
        if step is not None and step == last:
            os.kill(trainers.pids[0], signal.SIGKILL)
    wait_no_agent(trainers.run)
    assert last is not None
    assert steps_in(trainers.run)[-1] == steps_in(trainers.memory)[-1]


def test_an_agent_ends_where_nothing_moves(trainers: Trainers) -> None:
    """A limit stands in for storage that does not answer: the second block would pass in hours."""
    trainers.killed(after=2, far=[{"every": 1000, "bytes_per_s": 100}], patience=[0.05, 1.0])
    wait_no_agent(trainers.run)
    assert "stopped: storage does not answer" in said(trainers.run)
    assert steps_in(trainers.run) == []
