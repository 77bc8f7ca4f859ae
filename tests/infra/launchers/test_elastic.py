"""torchrun elastic: workers and nodes that are lost and that join; no bit of a loss differs."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.launchers.jobs import DEADLINE_S, ROOT, Told
from infra.launchers.worker import HOLD
from support.documents import blocks

PAGE = ROOT / "docs/cluster.md"
EXAMPLE = ROOT / "examples/elastic.py"
WORKER = Path(__file__).with_name("worker.py")
(COMMAND,) = (each.code for each in blocks(PAGE) if "--nnodes 1:2" in each.code)
WORKERS = 2  # of each node

pytestmark = pytest.mark.programs("torchrun")


class Job(Told):
    """A job of the documented command, with a torchrun for each node, all on this host."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
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
        with open(self.folder / f"log-{node}", "wb") as log:
            self._nodes[node] = subprocess.Popen(
                ["bash", "-c", command], env=self.environment(ENDPOINT=self._endpoint),
                stdout=log, stderr=log,
            )  # fmt: skip

    def until(self, name: str, count: int) -> None:
        self.wait_for(name, count, lambda: all(each.poll() is None for each in self.nodes))

    @property
    def nodes(self) -> list[subprocess.Popen[bytes]]:
        return [*self._nodes.values()]

    def lose(self, node: str) -> None:
        """All processes of a node die at once."""
        launcher = self._nodes.pop(node)
        for pid in [launcher.pid, *self.pids(node)]:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()

    def codes(self) -> list[int]:
        return [each.wait(DEADLINE_S) for each in self.nodes]

    def losses(self) -> str:
        return (self.folder / "run/losses.txt").read_text()

    def close(self) -> None:
        for each in self.nodes:
            each.kill()
            each.wait()
        self.end_workers()  # torchrun gives each a session of its own


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
    job.until("holding", 2 * WORKERS)


def test_after_a_killed_worker_all_workers_go_on(job: Job, undisturbed: str) -> None:
    holding_on_two_nodes(job)
    os.kill(job.pids("b")[0], signal.SIGKILL)
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
    job.until("holding", WORKERS)
    job.start("b")
    job.until("start", 3 * WORKERS)
    job.go()
    assert job.codes() == [0, 0], job.log()
    assert job.starts() == [*[(0, WORKERS)] * WORKERS, *[(HOLD, 2 * WORKERS)] * 2 * WORKERS]
    assert job.losses() == undisturbed
