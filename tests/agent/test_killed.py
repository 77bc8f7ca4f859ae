"""Trainers that are killed: what was in memory is on the disk afterwards, bit for bit.

STATEHOLD_AGENT_KILLS=100 kills so many.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

import statehold
from statehold.checkpoint.levels.hosts.discovery import Hosts
from statehold.cli import main
from support.agents import (
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
from support.inside import inside
from support.seeds import SEED

KILLS = int(os.environ.get("STATEHOLD_AGENT_KILLS", "4"))


@pytest.mark.thorough
def test_kills_at_random_moments(trainers: Trainers) -> None:
    """Each time all that was in memory is then lost, as in a restart of the host."""
    chance = random.Random(SEED)
    print(f"seed {SEED}, {KILLS} kills")
    for _ in range(KILLS):
        trainers.killed(
            after=chance.randint(1, 4),
            delay_s=chance.choice([0.0, 0.02]) * chance.random(),
            group=chance.random() < 0.5,
            worker=chance.random() < 0.3,
            far=[{"every": chance.choice([1, 3, 1000]), "keep": 2}],
        )
        wait_no_agent(trainers.run)
        in_memory = steps_in(trainers.memory)[-1]
        assert in_memory >= trainers.newest
        assert steps_in(trainers.run)[-1] == in_memory, said(trainers.run)
        check_intact(trainers.run, in_memory)
        trainers.newest = in_memory
        if chance.random() < 0.8:  # else the next trainer finds both
            shutil.rmtree(trainers.memory)
    exits = trainers.trained(saves=1)
    assert exits == [0]


@pytest.mark.thorough
def test_an_agent_is_told_when_it_is_not_needed(trainers: Trainers) -> None:
    exits = trainers.trained()
    assert exits == [0]
    wait_no_agent(trainers.run)
    assert steps_in(trainers.run) == [1, 3]
    assert said(trainers.run) == ""


def test_doctor_shows_the_agent(trainers: Trainers, capsys: pytest.CaptureFixture[str]) -> None:
    trainers.start(saves=1, then="stay")
    for event in trainers.events():
        if "staying" in event:
            (agent,) = wait_for(lambda: waiting(trainers.run), "no agent waits")
            main(["doctor", str(trainers.run)])
            os.kill(trainers.pids[0], signal.SIGKILL)
    assert f"process {agent}" in capsys.readouterr().out


def test_no_agent_is_started_where_none_is_wanted(trainers: Trainers, tmp_path: Path) -> None:
    trainers.start(saves=1, then="stay", far=[])
    for event in trainers.events():
        if "staying" in event:
            found = agents(trainers.run)
            os.kill(trainers.pids[0], 9)
    assert found == []


def test_no_agent_stays_where_the_ranks_are_on_several_hosts(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would see but a part of the step. Known at the second save at the latest."""
    run = tmp_path / "run"
    levels = [statehold.Memory(path=memory), statehold.Directory()]
    with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
        ckpt.save(1, {"w": content(1)}).wait("committed", DEADLINE_S)
        (agent,) = wait_for(lambda: waiting(run), "no agent waits")
        monkeypatch.setattr(Hosts, "are_apart", True)
        inside(ckpt).prepare_saving()
        wait_ended(agent)
        inside(ckpt).prepare_saving()
        assert agents(run) == []
        monkeypatch.undo()
    assert said(run) == ""


def test_an_agent_keeps_nothing_of_its_trainers(trainers: Trainers) -> None:
    """Whoever reads the trainer's output comes to its end, and no disk is kept from unmounting."""
    trainers.killed(after=2, far=[{"every": 1000, "bytes_per_s": "64KiB"}])
    trainers.newest = 0
    pid = trainers.agent_at_work()
    standard = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)]
    assert standard == ["/dev/null"] * 2
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.getsid(pid) != os.getsid(0)
    os.kill(pid, 15)


def test_all_of_a_job_of_several_ranks(trainers: Trainers) -> None:
    trainers.killed(after=5, ranks=2)
    wait_no_agent(trainers.run)
    newest = steps_in(trainers.memory)[-1]
    assert steps_in(trainers.run)[-1] == newest >= 2
    check_intact(trainers.run, newest)
    shutil.rmtree(trainers.memory)
    trainers.newest = newest
    exits = trainers.trained(saves=1)
    assert exits == [0]


def test_a_rank_is_killed_and_the_others_are_ended_for_it(trainers: Trainers) -> None:
    """As torchrun does: nothing happens before rank 0, which commits, has ended."""
    trainers.start(saves=3, then="stay", ranks=2)
    staying = 0
    for event in trainers.events():
        staying += "staying" in event
        if staying == 2 and "staying" in event:
            os.kill(trainers.pids[1], signal.SIGKILL)
            wait_ended(trainers.pids[1])
            (agent,) = wait_for(lambda: waiting(trainers.run), "no agent waits")
            assert said(trainers.run) == ""
            os.kill(trainers.pids[0], signal.SIGTERM)
    wait_ended(agent)
    assert steps_in(trainers.run)[-1] == 3
    check_intact(trainers.run, 3)


def test_the_step_gets_to_an_object_store(trainers: Trainers, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "objects").mkdir()
    objects = {"url": f"file://{tmp_path}/objects", "every": "24h"}
    trainers.killed(after=3, far=[], objects=objects)
    wait_no_agent(trainers.run)
    newest = steps_in(trainers.memory)[-1]
    assert f"step {newest} is committed at level objects" in said(trainers.run)
    shutil.rmtree(trainers.memory)
    trainers.newest = newest
    exits = trainers.trained(saves=0, far=[], objects=objects)  # restores, and compares
    assert exits == [0]
    assert trainers.restored == newest
