"""Trainers to be killed, the agents that they leave behind, and what these have done."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from statehold.checkpoint.agent.looking import LOG_NAME, agents_of
from statehold.cli.checking import SpanReader, check_step
from statehold.reading.places import file_system, find
from support import scripts
from support.faults import DEADLINE_S, must

NUMEL = 700_000
VICTIM = Path(__file__).parents[1] / "agent" / "victim.py"


def content(step: int) -> torch.Tensor:
    """What a step must hold: different in every element from step to step."""
    return torch.arange(NUMEL, dtype=torch.int32) * 31 + step


def steps_in(folder: Path) -> list[int]:
    """The committed steps of a directory."""
    names = os.listdir(folder) if folder.exists() else []
    return sorted(int(name[5:]) for name in names if name.startswith("step-") and len(name) == 17)


def check_intact(run: Path, step: int) -> None:
    """As `statehold verify` looks at it."""
    fs = file_system()
    with SpanReader() as reader:
        found = check_step(fs, find(fs, str(run / f"step-{step:012d}")), reader)
    must(found.is_intact, found)


def agents(run: Path) -> list[int]:
    """The agents of a run: those that wait, and those at work."""
    return agents_of(str(run))


def waiting(run: Path) -> list[int]:
    """The agents of a run that are nobody's children any more."""
    found = agents(run)
    return found if len(found) == 1 and _session(found[0]) != found[0] else []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return pid


def wait_ended(pid: int) -> None:
    """Return once a process has ended, whosever child it is."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            ended = select.select([pidfd], [], [], DEADLINE_S)[0]
        finally:
            os.close(pidfd)
        must(ended, f"process {pid} goes on")


def wait_no_agent(run: Path) -> None:
    while found := agents(run):
        for pid in found:
            wait_ended(pid)


def wait_for(
    fact: Callable[[], Any], what: str | Callable[[], str], deadline_s: float = DEADLINE_S
) -> Any:
    """What `fact` gives once it holds: of what other processes do, nobody tells us."""
    until = time.monotonic() + deadline_s
    while not (found := fact()):
        must(time.monotonic() < until, what)
        signal.sigtimedwait([], 0.005)
    return found


def said(run: Path) -> str:
    """What agents of a run have logged."""
    path = run / LOG_NAME
    return path.read_text() if path.exists() else ""


def at_work(run: Path, step: int) -> int:
    """The agent that has begun to copy this step, and is in the middle of it."""
    told = f"copying step {step} to"
    wait_for(lambda: told in said(run), "no agent begins to copy")
    pattern = f"step-{step:012d}*.partial/*.safetensors"
    wait_for(lambda: list(run.glob(pattern)), "no agent copies")
    (pid,) = wait_for(lambda: agents(run), "the agent is gone")
    return int(pid)


class Server:
    """The fork server, and the requests to it."""

    def __init__(self) -> None:
        self._process = scripts.start([VICTIM], stdin=scripts.PIPE, stdout=scripts.PIPE)

    def ask(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def event(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        event: dict[str, Any] = json.loads(self._process.stdout.readline())
        return event

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()  # a worker may have it still


class Trainers:
    """Trainers of one run, which are held to what was promised before."""

    def __init__(self, server: Server, folder: Path, memory: Path) -> None:
        self._server = server
        self.run, self.memory = folder / "run", memory
        self.newest = 0  # that was said to be committed
        self.restored = 0
        self.workers: list[int] = []
        self.pids: list[int] = []

    def start(self, **order: Any) -> None:
        told = {
            "run": str(self.run), "memory": str(self.memory), "far": [{"every": 1000}],
            "saves": 3, "then": "close", "worker": False, "patience": None, "ranks": 1,
            "objects": None,
        }  # fmt: skip
        self._server.ask(told | order)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the trainers of a request say, to its end."""
        while True:
            event = self._server.event()
            must("wrong" not in event and "error" not in event, event)
            self.pids = event.get("children", self.pids)
            self.newest = max(self.newest, event.get("committed", 0))
            if "worker" in event:
                self.workers.append(event["worker"])
            if "restored" in event:
                self.restored = event["restored"]
                must(self.restored >= self.newest, f"step {self.newest} was lost: {event}")
            yield event
            if "exits" in event:
                return

    def trained(self, **order: Any) -> list[int]:
        """A request to its end; the exit codes."""
        self.start(**order)
        exits: list[int] = list(self.events())[-1]["exits"]
        return exits

    def killed(
        self, after: int = 1, delay_s: float = 0.0, group: bool = False, **order: Any
    ) -> None:
        """Train, and kill the trainers so long after so many commits."""
        self.start(**{"saves": 1000, **order})
        for event in self.events():
            after -= "committed" in event
            if after == 0 and "committed" in event:
                signal.sigtimedwait([], delay_s)  # any moment is a good one to die
                for pid in self.pids:
                    (os.killpg if group else os.kill)(pid, signal.SIGKILL)
            if "exits" in event:
                must(set(event["exits"]) == {-signal.SIGKILL}, event)

    def agent_at_work(self) -> int:
        return at_work(self.run, steps_in(self.memory)[-1])

    def close(self) -> None:
        for pid in self.workers:
            with contextlib.suppress(ProcessLookupError):  # it went with the group of its trainer
                os.kill(pid, signal.SIGKILL)
        wait_no_agent(self.run)
