"""SIGKILL of one of four processes: at each step of the commit protocol, and at random moments.

What has to hold, for either way to coordinate: the others' saves fail in time with an error that
names the dead rank; no torn step is visible; no step that a rank reported as committed is lost; the
next job restores the newest step bit for bit on all ranks and saves on. All kills of a lane hit the
same run directory, so each job also has to cope with what the death before it left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.seeds import SEED

ALL = bool(os.environ.get("STATEHOLD_CRASH_KILLS"))
RANDOM_KILLS = int(os.environ.get("STATEHOLD_CRASH_KILLS", "2"))
SIZE = 4
TIMEOUT_S = 3.0
LONG_S = 60.0  # where nobody is killed
STALL_S = 60.0  # how long a busy machine may stand still
ANSWER_S = 120.0
KINDS = ("store", "directory")

# (rank, point, after): every step of the protocol, by the ranks that take it.
LED = ["D4 gather", "D5", "D6", "D7", "R1", "R3", "told"]
TAKEN = ["D1 directory", "D1 file", "D2", "D3 record", "D3 sync", "D4 arrive"]
KILLS = [
    *((0, point, after) for point in [*TAKEN, *LED] for after in (False, True)),
    *((2, point, after) for point in [*TAKEN, "outcome"] for after in (False, True)),
]
# The everyday suite takes some of them, other ones in each lane; the seed says which.
STRIDE = 13
EVERYDAY = {
    kind: [*KILLS[(SEED + index * 6) % STRIDE :: STRIDE]] for index, kind in enumerate(KINDS)
}


@dataclass
class Lane:
    """Jobs on one run directory, one after the other; what was promised so far."""

    end: socket.socket
    run: Path
    kind: str
    committed: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def start(
        self, kill: dict[str, Any] | None, saves: int, timeout_s: float = TIMEOUT_S
    ) -> Iterator[dict[str, Any]]:
        """Runs a job; yields what its processes report. Ends when all that live are done."""
        order = {"run": str(self.run), "kind": self.kind, "timeout_s": timeout_s}
        self.end.send(json.dumps({**order, "kill": kill, "saves": saves}).encode())
        self.events = []
        done: set[int] = set()
        dead: set[int] = set()
        while len(done | dead) < SIZE:
            event = self._receive()
            done |= {event["rank"]} if "done" in event else set()
            dead |= {event["rank"]} if "killed" in event else set()
            yield event
            dead |= {event["dead"]} if "dead" in event else set()

    def finish(self) -> list[int]:
        """Let the processes go; how each of them ended."""
        self.end.send(b"end")
        exits: list[int] = self._receive()["exits"]
        return exits

    def _receive(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.end.recv(1 << 16))
        assert "wrong" not in event, event
        self.events.append(event)
        if "restored" in event:
            restored = event["restored"] or 0
            assert restored >= self.committed, f"step {self.committed} was lost: {event}"
        return event

    def settle(self) -> None:
        """Hold the next job to what this one reported, and its ranks to one another."""
        assert len({(e["restored"], *e["steps"]) for e in self.events if "restored" in e}) == 1
        told = [event["committed"] for event in self.events if "committed" in event]
        self.committed = max([self.committed, *told])

    def check_survivors(self, dead: int) -> None:
        """All but the dead rank learned its name, in time."""
        failed = {event["rank"]: event for event in self.events if "failed" in event}
        assert failed.keys() == set(range(SIZE)) - {dead}
        for event in failed.values():
            assert event["error"] == "PeerLostError", event
            assert event["ranks"] == [dead], event
            assert event["seconds"] < 2.5 * TIMEOUT_S + STALL_S

    def job(self, kill: tuple[int, str, bool] | None, saves: int = 4) -> None:
        order = None if kill is None else dict(zip(("rank", "at", "after"), kill, strict=True))
        for _ in self.start(order, saves, TIMEOUT_S if kill else LONG_S):
            pass
        exits = self.finish()
        self.settle()
        if kill is None:
            assert exits == [0] * SIZE
            assert not [name for name in os.listdir(self.run) if name.endswith(".partial")]
            assert not [event for event in self.events if "failed" in event]
            return
        rank, point, after = kill
        [killed] = [event for event in self.events if "killed" in event]
        assert (killed["rank"], killed["killed"], killed["after"]) == (rank, point, after)
        assert [os.WTERMSIG(status) for status in exits] == [
            signal.SIGKILL if each == rank else 0 for each in range(SIZE)
        ]
        self.check_survivors(rank)


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[list[Lane]]:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in KINDS]
    theirs = [pair[1] for pair in pairs]
    with open(tmp_path / "stderr", "w") as log:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py")),
             *(str(end.fileno()) for end in theirs)],
            pass_fds=[end.fileno() for end in theirs], stderr=log,
        )  # fmt: skip
    for end in theirs:
        end.close()
    found = []
    for (end, _), kind in zip(pairs, KINDS, strict=True):
        end.settimeout(ANSWER_S)
        found.append(Lane(end, tmp_path / kind, kind))
    yield found
    for lane in found:
        lane.end.close()
    server.wait(ANSWER_S)


def in_both(lanes: list[Lane], act: Any) -> None:
    """The lanes side by side: most of the time they wait for a deadline."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        for told in [pool.submit(act, lane) for lane in lanes]:
            told.result()


@pytest.mark.thorough
def test_kill_at_every_step_of_the_protocol(lanes: list[Lane]) -> None:
    print(f"seed {SEED}")

    def kill_all(lane: Lane) -> None:
        for kill in KILLS if ALL else EVERYDAY[lane.kind]:
            lane.job(kill)
        lane.job(None, saves=2)

    in_both(lanes, kill_all)


@pytest.mark.thorough
def test_kill_at_random_moments(lanes: list[Lane]) -> None:
    print(f"seed {SEED}, {RANDOM_KILLS} kills")

    def kill_some(lane: Lane) -> None:
        chance = random.Random(f"{SEED} {lane.kind}")
        for _ in range(RANDOM_KILLS // len(KINDS)):
            victim, left, pids = chance.randrange(SIZE), chance.randint(1, 4 * SIZE), []
            for event in lane.start(None, saves=1000):
                pids = event.get("pids", pids)
                left -= "requested" in event
                if left == 0:
                    # Not a synchronisation: any moment of a save is a good one to die.
                    signal.sigtimedwait([], chance.random() * 0.03)
                    os.kill(pids[victim], signal.SIGKILL)
                    event["dead"] = victim
                    left = -1
            exits = lane.finish()
            assert os.WTERMSIG(exits[victim]) == signal.SIGKILL
            lane.settle()
            lane.check_survivors(victim)
        lane.job(None, saves=2)

    in_both(lanes, kill_some)
