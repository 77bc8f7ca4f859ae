"""However a script ends: its saves are committed, and the newest step is at every level.

Within a with-block or without, alone and on two ranks, by an exception, Ctrl-C, sys.exit or by
itself; and one rank's end keeps the others no longer than it must. With STATEHOLD_LEAVES all
combinations, else some.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statehold.checkpoint import session as opened
from support import scripts
from support.in_memory import SimFs
from support.levels import FAR, LATER, steps_at, two
from support.rank_states import state
from support.ranks import Ranks

STRAGGLERS_S = 50.0  # in the processes: long enough for a busy machine
EXITS = {"error": 1, "interrupt": -signal.SIGINT, "exit": 5, "": 0}
ALL = "STATEHOLD_LEAVES" in os.environ
ENDS = [
    *itertools.product([1], [True, False], EXITS),
    *itertools.product([2], [True, False], ["error", "exit", ""]),
]
EVERYDAY = [
    (1, True, "interrupt"), (1, False, "error"), (2, True, "exit"), (2, False, ""),
]  # fmt: skip


class Server:
    """Runs requests, and says what is at the two levels afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: list[dict[str, Any]] = []
        with (folder / "stderr").open("w") as log:
            self._process = scripts.start(
                [Path(__file__).with_name("ends_victim.py")],
                stdin=scripts.PIPE,
                stdout=scripts.PIPE,
                stderr=log,
            )

    def run(self, name: str, **order: Any) -> dict[str, Any]:
        order |= {"run": str(self.folder / name), "far": str(self.folder / f"{name}-far")}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self.failed = []
        while "exits" not in (event := json.loads(self._process.stdout.readline())):
            self.failed.append(event)
        return event

    def steps(self, name: str) -> list[int]:
        names = os.listdir(self.folder / name)
        return sorted(int(each[5:]) for each in names if each[:5] == "step-" and len(each) == 17)

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ends"))
    yield server
    server.close()


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "within", "how"), ENDS if ALL else EVERYDAY)
def test_the_newest_step_is_at_every_level(
    server: Server, ranks: int, within: bool, how: str
) -> None:
    name = f"{ranks}-{within}-{how}"
    ended = server.run(name, ranks=ranks, within=within, how=how, only=None)
    assert ended["exits"] == [EXITS[how]] * ranks
    assert server.steps(name) == [1, 2]
    assert server.steps(f"{name}-far") == [1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("within", [True, False] if ALL else [True])
def test_an_exception_on_one_rank_is_told_to_the_others(server: Server, within: bool) -> None:
    name = f"one-{within}"
    ended = server.run(name, ranks=2, within=within, how="error", only=1, stragglers_s=STRAGGLERS_S)
    assert ended["exits"] == [1, 1]
    [failed] = server.failed
    assert failed["rank"] == 0
    assert "rank 1" in failed["failed"]
    assert "of the user's" in failed["failed"]
    assert failed["seconds"] < STRAGGLERS_S
    assert server.steps(name) == [1, 2]
    assert server.steps(f"{name}-far") == [1, 2]


@pytest.mark.thorough
def test_a_rank_that_ends_does_not_wait_long_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "STRAGGLERS_S", 0.3)
    fs = SimFs(seed=1)
    with Ranks(fs, 2, run="/run", levels=two(far=LATER)) as ranks:
        for step in (1, 2):
            ranks.save(step, lambda rank: state(rank, 1))
        ranks.ckpts[1].__exit__(ValueError, ValueError("of the user's"), None)
        ranks.ckpts[0].__exit__(ValueError, ValueError("of the user's"), None)
    assert steps_at(fs, FAR) == [1]
