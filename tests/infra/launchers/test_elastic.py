"""torchrun elastic: workers and nodes that are lost and that join; no bit of a loss differs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statehold
from infra.launchers.worker import HOLD
from support.agents import wait_ended, wait_for
from support.documents import blocks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/cluster.md"
EXAMPLE = ROOT / "examples/elastic.py"
WORKER = Path(__file__).with_name("worker.py")
(COMMAND,) = (each.code for each in blocks(PAGE) if "--nnodes 1:2" in each.code)
DEADLINE_S = 300.0
WORKERS = 2  # of each node

pytestmark = pytest.mark.programs("torchrun")


class Job:
    """A job of the documented command, with a torchrun for each node, all on this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        command = COMMAND
        for word, here in [
            ("elastic.py", shlex.join([str(WORKER), str(EXAMPLE), str(self.folder), node])),
            ("--nproc-per-node 8", f"--nproc-per-node {WORKERS} --local-addr 127.0.0.1"),
            ("torchrun", "exec torchrun"),
            # Each node sees the address of the endpoint as its own.
            ("--rdzv-endpoint", f"--rdzv-conf is_host={int(node == 'a')} --rdzv-endpoint"),
        ]:
            assert command.count(f"{word} ") + command.count(f"{word}\n") == 1, command
            command = command.replace(word, here)
        environment = {
            **os.environ, "ENDPOINT": self._endpoint, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(statehold.__file__).parents[1]), str(ROOT / "tests")]
            ),
        }  # fmt: skip
        with open(self.folder / f"log-{node}", "wb") as log:
            self._nodes[node] = subprocess.Popen(
                ["bash", "-c", command], env=environment, stdout=log, stderr=log
            )

    def told(self, name: str, node: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        return [each for each in events if name in each and node in (None, each["node"])]

    def wait_for(self, name: str, count: int) -> None:
        wait_for(lambda: len(self.told(name)) >= count, self.log, DEADLINE_S)

    def starts(self) -> list[tuple[int, int]]:
        """From which step workers went on, and among how many; in the order of the events."""
        return [(each["start"], each["ranks"]) for each in self.told("start")]

    def go(self) -> None:
        (self.folder / "go").touch()

    def lose(self, node: str) -> None:
        """All processes of a node die at once."""
        launcher = self._nodes.pop(node)
        for pid in [launcher.pid, *(each["pid"] for each in self.told("start", node))]:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()

    def codes(self) -> list[int]:
        return [each.wait(DEADLINE_S) for each in self._nodes.values()]

    def losses(self) -> str:
        return (self.folder / "run/losses.txt").read_text()

    def log(self) -> str:
        logs = sorted(self.folder.glob("log-*"))
        return "\n".join(f"{each.name}:\n{each.read_text()[-4000:]}" for each in logs)

    def close(self) -> None:
        for each in self._nodes.values():
            each.kill()
            each.wait()
        for each in self.told("start"):  # torchrun gives each worker a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(each["pid"], signal.SIGKILL)
                wait_ended(each["pid"])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path)) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The losses of a job of two nodes that nothing disturbs."""
    with contextlib.closing(Job(tmp_path_factory.mktemp("undisturbed"))) as job:
        job.go()
        job.start("a")
        job.start("b")
        assert job.codes() == [0, 0], job.log()
        assert job.starts() == [(0, 2 * WORKERS)] * 2 * WORKERS
        return job.losses()


def holding_on_two_nodes(job: Job) -> None:
    job.start("a")
    job.start("b")
    job.wait_for("holding", 2 * WORKERS)


def test_after_a_killed_worker_all_workers_go_on(job: Job, undisturbed: str) -> None:
    holding_on_two_nodes(job)
    os.kill(job.told("start", "b")[0]["pid"], signal.SIGKILL)
    job.go()
    assert job.codes() == [0, 0], job.log()
    all_of_them = 2 * WORKERS
    assert job.starts() == [*[(0, all_of_them)] * all_of_them, *[(HOLD, all_of_them)] * all_of_them]
    assert job.losses() == undisturbed


def test_after_a_lost_node_the_other_one_goes_on(job: Job, undisturbed: str) -> None:
    holding_on_two_nodes(job)
    job.lose("b")
    job.go()
    assert job.codes() == [0], job.log()
    assert job.starts() == [*[(0, 2 * WORKERS)] * 2 * WORKERS, *[(HOLD, WORKERS)] * WORKERS]
    assert job.losses() == undisturbed


def test_a_node_that_joins_trains_with_the_others(job: Job, undisturbed: str) -> None:
    job.start("a")
    job.wait_for("holding", WORKERS)
    job.start("b")
    job.wait_for("start", 3 * WORKERS)
    job.go()
    assert job.codes() == [0, 0], job.log()
    assert job.starts() == [*[(0, WORKERS)] * WORKERS, *[(HOLD, 2 * WORKERS)] * 2 * WORKERS]
    assert job.losses() == undisturbed
