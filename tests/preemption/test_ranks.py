"""Some of four ranks are asked to leave at a random moment: all leave, in time, alike.

Processes that meet in an all-reduce at each step. What has to hold: all end with one exit code and
one last step, which is there afterwards bit for bit if the code says so, and nothing half is.
STATEHOLD_LEAVES=1000 asks so many times.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from statehold.ranks.preemption import LATE, LEFT
from support import scripts
from support.seeds import SEED

LEAVES = int(os.environ.get("STATEHOLD_LEAVES", "3"))
SIZE = 4
ENOUGH_S = 60.0  # for a last save on a busy machine
SHORT_S = 2.0
LATE_S = 0.0 if "STATEHOLD_LEAVES" in os.environ else 60.0  # see test_leaving
FOREVER = 1_000_000


class Job:
    """The ranks of one job: what they have reported, and how they end."""

    def __init__(self, server: scripts.Script, run: Path, newest: int) -> None:
        self._server = server
        self._run = run
        self._newest = newest
        self.pids: list[int] = []
        self.restored: set[int] = set()
        self.last: dict[int, int] = {}
        self.exits: dict[int, int] = {}
        self.at: dict[int, float] = {}
        self.about = ""

    def kill(self) -> None:
        """What is left of a job that a test has given up."""
        for rank in set(range(len(self.pids))) - self.exits.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def start(self, **order: Any) -> None:
        order = {"run": str(self._run), "memory": None, "coordination": "auto", "slow": [],
                 "within_s": ENOUGH_S, "steps": FOREVER, "delay_s": 0.0, **order}  # fmt: skip
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Take in reports up to the first that satisfies it."""
        assert self._server.stdout is not None
        while True:
            event = json.loads(self._server.stdout.readline())
            self._take(event)
            if holds(event):
                return

    def until_step(self, number: int) -> None:
        """Return once the ranks have reported so many steps in all."""
        left = [number]

        def counted(event: dict[str, Any]) -> bool:
            left[0] -= "step" in event
            return left[0] <= 0

        self.until(counted)

    def finish(self) -> None:
        self.until(lambda event: "over" in event)
        assert len(self.restored) <= 1, "ranks restored different steps"

    def _take(self, event: dict[str, Any]) -> None:
        assert "wrong" not in event, event
        assert "failed" not in event, event["failed"]
        self.pids = event.get("pids", self.pids)
        if "restored" in event:
            assert event["restored"] >= self._newest, f"step {self._newest} was lost: {event}"
            self.restored.add(event["restored"])
        if "last" in event:
            self.last[event["rank"]] = event["last"]
        if "exit" in event:
            self.exits[event["rank"]], self.at[event["rank"]] = event["exit"], event["at"]


class Jobs:
    """Jobs on one run, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.memory = folder / "memory"
        self.newest = 0
        self._job: Job | None = None
        with (folder / "stderr").open("w") as log:
            self._server = scripts.start(
                [Path(__file__).with_name("ranks_victim.py")],
                stdin=scripts.PIPE,
                stdout=scripts.PIPE,
                stderr=log,
            )

    def new(self, **order: Any) -> Job:
        self._job = Job(self._server, self.run, self.newest)
        self._job.start(**order)
        return self._job

    def steps(self) -> list[int]:
        names = os.listdir(self.run) if self.run.exists() else []  # a test may be the first here
        return sorted(int(name[5:]) for name in names if name[:5] == "step-" and len(name) == 17)

    def close(self) -> None:
        if self._job is not None:
            self._job.kill()
        self._server.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("ranks"))
    yield jobs
    jobs.close()


def wait_s(seconds: float) -> None:
    """Not a synchronisation: any moment is a good one to ask."""
    signal.sigtimedwait([], seconds)


def asked_at_random(jobs: Jobs, chance: random.Random, **order: Any) -> tuple[Job, float]:
    """A job whose ranks are asked to leave, some of them, and the time until all had ended."""
    job = jobs.new(
        body=chance.choice(["every", "every", "rare"]),
        memory=str(jobs.memory),
        coordination=chance.choice(["auto", "auto", "directory"]),
        slow=chance.sample(range(SIZE), chance.randint(0, 2)),
        **order,
    )
    job.until_step(chance.randint(1, 10 * SIZE))
    begin = time.monotonic()
    asked = chance.sample(range(SIZE), chance.randint(1, SIZE))
    for rank in asked:
        wait_s(chance.choice([0.0, 0.0, 0.05]) * chance.random())
        os.kill(job.pids[rank], chance.choice([signal.SIGTERM, signal.SIGUSR1]))
    job.finish()
    assert len(set(job.last.values())) <= 1, f"different last steps: {job.last}"
    job.about = f"asked {asked}, ended {[(rank, at - begin) for rank, at in job.at.items()]}"
    return job, max(job.at.values()) - begin


@pytest.mark.thorough
def test_some_ranks_are_asked_at_random_moments(server: Jobs) -> None:
    print(f"seed {SEED}, {LEAVES} times")
    chance = random.Random(SEED)
    for _ in range(LEAVES):
        job, seconds = asked_at_random(server, chance)
        assert job.exits == dict.fromkeys(range(SIZE), LEFT), job.exits
        assert seconds < ENOUGH_S
        assert len(job.last) == SIZE
        # All levels have it, whatever their cadence.
        assert server.steps()[-1] == job.last[0]
        server.newest = job.last[0]


@pytest.mark.thorough
def test_deadlines_that_are_too_short_at_random_moments(server: Jobs) -> None:
    """Storage so slow that the last save is committed in time, or is not."""
    print(f"seed {SEED}, {max(1, LEAVES // 2)} times")
    chance = random.Random(SEED + 1)
    codes = []
    for _ in range(max(1, LEAVES // 2)):
        within_s = 1.0 + 2 * chance.random()
        job, seconds = asked_at_random(
            server, chance, within_s=within_s, delay_s=chance.choice([0.05, 0.2, 0.5])
        )
        assert set(job.exits.values()) <= {LEFT, LATE}, job.exits
        assert seconds < within_s + LATE_S, job.about
        if LEFT in job.exits.values():  # the next job has to find it
            server.newest = job.last[0]
        codes.append("".join("+" if job.exits[rank] == LEFT else "-" for rank in range(SIZE)))
    print(" ".join(codes))
    job = server.new(body="every", steps=2, memory=str(server.memory))
    job.finish()
    assert set(job.exits.values()) == {0}
    assert not [name for name in os.listdir(server.run) if name.endswith(".partial")]
    server.newest = max(job.restored) + 2


@pytest.mark.thorough
def test_a_silent_rank_keeps_nobody_beyond_the_deadline(server: Jobs) -> None:
    before = server.steps()
    job = server.new(body="rare", within_s=SHORT_S, memory=str(server.memory))
    job.until_step(SIZE)
    begin = time.monotonic()
    os.kill(job.pids[2], signal.SIGSTOP)
    os.kill(job.pids[0], signal.SIGTERM)
    job.until(lambda event: len(job.exits) == SIZE - 1)
    took = time.monotonic() - begin
    os.kill(job.pids[2], signal.SIGKILL)
    job.finish()
    assert job.exits == {0: LATE, 1: LATE, 2: -signal.SIGKILL, 3: LATE}
    assert 0.6 * SHORT_S < took < SHORT_S + LATE_S
    assert server.steps() == before
