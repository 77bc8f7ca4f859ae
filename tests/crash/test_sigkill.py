"""SIGKILL before every storage operation of a save, and at random moments.

The everyday suite kills before the first operation of each kind and before a third of the others;
the seed chooses the third and the moments. With STATEHOLD_CRASH_KILLS it kills before all of them,
and at so many moments.
All kills of a test hit the same run directory, so each start also has to cope with what the death
before it left behind. After every death the next process restores every visible step and compares
it element by element; no step reported as committed may be missing.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import scripts
from support.seeds import SEED

ALL = bool(os.environ.get("STATEHOLD_CRASH_KILLS"))
RANDOM_KILLS = int(os.environ.get("STATEHOLD_CRASH_KILLS", "12"))
EVERYDAY = 3  # one operation in so many


class Victim:
    """Runs requests in the fork server and holds every child to what was promised before."""

    def __init__(self, run: Path, *, shares: bool = False) -> None:
        self.run, self.shares = run, shares
        self.committed = 0
        self.linked = 0  # steps that shared files with the one before
        self.kills: dict[str, int] = {}
        victim = Path(__file__).with_name("victim.py")
        self._process = scripts.start([victim], stdin=scripts.PIPE, stdout=scripts.PIPE)

    def request(
        self,
        *,
        kill_at: tuple[str, int] | None = None,
        saves: int = 3,
        again: bool = False,
        waits: bool = False,
    ) -> Iterator[dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"run": str(self.run), "kill_at": kill_at, "saves": saves, "again": again}
        order |= {"shares": self.shares, "waits": waits}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        while True:
            event = json.loads(self._process.stdout.readline())
            assert "wrong" not in event, event
            assert "error" not in event, event
            if "committed" in event:
                self.committed = event["committed"]
                self.linked += event["linked"] > 0
            if "restored" in event:
                restored = event["restored"] or 0
                assert restored >= self.committed, f"step {self.committed} was lost: {event}"
                self.committed = restored
            yield event
            if "exit" in event:
                return

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    victim = Victim(tmp_path / "run")
    yield victim
    victim.close()


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Victim]:
    """A victim whose steps share files."""
    victim = Victim(tmp_path / "run", shares=True)
    yield victim
    victim.close()


def numbers(count: int) -> list[int]:
    """Before which of `count` operations of a kind the process is killed."""
    everyday = {1, *range(2 + SEED % EVERYDAY, count + 1, EVERYDAY)}
    return list(range(1, count + 1)) if ALL else sorted(everyday)


@pytest.mark.thorough
def test_kill_before_every_operation(victim: Victim) -> None:
    print(f"seed {SEED}")
    (counts,) = [e["operations"] for e in victim.request() if "operations" in e]
    assert sum(counts.values()) > 20
    # Less is left to do, or more, after some deaths: a late operation may not come.
    for operation, count in counts.items():
        for number in numbers(count):
            end = list(victim.request(kill_at=(operation, number)))[-1]
            assert end["exit"] in (0, signal.SIGKILL)
            victim.kills[operation] = victim.kills.get(operation, 0) + (end["exit"] != 0)
    for operation in ("mkdir", "open_write", "sync_dir", "write_file", "rename", "rmdir"):
        assert victim.kills.get(operation), f"no kill before {operation}: {victim.kills}"
    assert list(victim.request(saves=1))[-1]["exit"] == 0


@pytest.mark.thorough
def test_kill_before_every_operation_where_names_cannot_be_exchanged(victim: Victim) -> None:
    """Of a step that is saved twice: the kernel refuses to exchange its directories."""
    (counts,) = [e["operations"] for e in victim.request(saves=1, again=True) if "operations" in e]
    assert counts["exchange"] == 1
    for operation in ("exchange", "rename"):
        for number in range(1, counts[operation] + 1):
            kill_at = operation, number
            end = list(victim.request(kill_at=kill_at, saves=1, again=True))[-1]
            assert end["exit"] in (0, signal.SIGKILL)
            victim.kills[operation] = victim.kills.get(operation, 0) + (end["exit"] != 0)
    assert victim.kills["rename"] >= 4  # D6 of the first save; E1, D6 and E3 of the second
    assert list(victim.request(saves=1))[-1]["exit"] == 0
    assert not list(victim.run.glob("*.replaced"))


@pytest.mark.thorough
def test_kill_before_every_operation_on_shared_files(sharing: Victim) -> None:
    (counts,) = [e["operations"] for e in sharing.request(saves=7) if "operations" in e]
    assert counts["link"] > 4
    killed = 0
    for operation in ("link", "open_write", "unlink") if ALL else ("link",):
        for number in numbers(counts[operation]):
            end = list(sharing.request(kill_at=(operation, number), saves=7))[-1]
            assert end["exit"] in (0, signal.SIGKILL)
            killed += end["exit"] != 0
    assert killed
    assert_links(sharing)


@pytest.mark.thorough
def test_kill_at_random_moments_while_files_are_shared(sharing: Victim) -> None:
    kill_at_random_moments(sharing)
    print(f"{sharing.linked} steps with links")
    if RANDOM_KILLS >= 100:
        assert sharing.linked > RANDOM_KILLS // 8
    assert_links(sharing)


def assert_links(sharing: Victim) -> None:
    """The run that is left still shares files."""
    before = sharing.linked
    # What a save links are files of the steps that were committed when it began.
    assert list(sharing.request(saves=8, waits=True))[-1]["exit"] == 0
    assert sharing.linked > before


def test_kill_at_random_moments(victim: Victim) -> None:
    kill_at_random_moments(victim)


def kill_at_random_moments(victim: Victim) -> None:
    chance = random.Random(SEED)
    print(f"seed {SEED}, {RANDOM_KILLS} kills")
    killed_while_saving = 0
    for _ in range(RANDOM_KILLS):
        requests_left = chance.randint(1, 6)
        pid = 0
        for event in victim.request(saves=1000):
            pid = event.get("child", pid)
            requests_left -= "requested" in event
            if requests_left == 0:
                # Not a synchronisation: any moment of the save under way is a good one to die.
                signal.sigtimedwait([], chance.random() * 0.03)
                os.kill(pid, signal.SIGKILL)
                requests_left = -1
            if "exit" in event:
                assert event["exit"] == signal.SIGKILL
                killed_while_saving += 1
    assert killed_while_saving == RANDOM_KILLS
    assert list(victim.request(saves=1))[-1]["exit"] == 0
