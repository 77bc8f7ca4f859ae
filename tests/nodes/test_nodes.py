"""Four simulated nodes: one is lost, with its memory and its disk, and the others have all of it.

Each node has a memory file system, a disk and a host name of its own. In each round one is lost at
some moment, and all ranks end with it; the job starts again on the nodes that are left, or on these
and an empty one, and every rank compares what all ranks had saved, element by element. What counts
as safe is what rank 0 has said is copied: no step before that one may be what is restored.

Skipped, and counted, where namespaces are not permitted. STATEHOLD_NODES=n runs n rounds.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statehold
from nodes.node import restored
from statehold.checkpoint.levels.remembered import recall
from support.faults import SMALL, must
from support.seeds import SEED

ROUNDS = int(os.environ.get("STATEHOLD_NODES", "4"))
NODES = 4
ANSWER_S = 120.0
SAVES = 4


def permitted() -> bool:
    probe = ["unshare", "--mount", "--uts", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not permitted(), reason="namespaces for nodes are not permitted")


class Cluster:
    """Nodes that may be lost; what was promised so far."""

    def __init__(self, folder: Path, count: int) -> None:
        (folder / "disk").mkdir()
        self._folder = folder
        self.run = str(folder / "run")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        with open(folder / "stderr", "w") as log:
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("node.py")), str(folder),
                 *(str(theirs.fileno()) for _, theirs in pairs)],
                pass_fds=[theirs.fileno() for _, theirs in pairs], stderr=log,
            )  # fmt: skip
        self.nodes = {number: ours for number, (ours, _) in enumerate(pairs)}
        for ours, theirs in pairs:
            theirs.close()
            ours.settimeout(ANSWER_S)
        for node in self.nodes.values():
            must("node" in json.loads(node.recv(1 << 16)))
        self.events: list[dict[str, Any]] = []  # of this job
        self.before: list[dict[str, Any]] = []  # and of the one before
        self.safe = self.restored = 0

    def start(
        self, numbers: list[int], each: int, kind: str, *, flush: bool, shared: bool = False
    ) -> None:
        """A job on these nodes."""
        size = len(numbers) * each
        job = {
            "run": self.run, "disk": str(self._folder / "disk/steps"),
            "kind": kind, "port": free_port(), "size": size, "saves": SAVES, "flush": flush,
            "is_first": self.safe == 0, "shared": shared,
        }  # fmt: skip
        self._on = {number: range(at * each, (at + 1) * each) for at, number in enumerate(numbers)}
        self.before, self.events = self.events, []
        for number, ranks in self._on.items():
            self._tell(number, {"job": job, "ranks": list(ranks)})

    def until(self, is_over: Any) -> None:
        """Follow the job until then."""
        while not is_over(self.events):
            ready, _, _ = select.select([self.nodes[each] for each in self._on], [], [], ANSWER_S)
            must(ready, (self.events[-8:], self._log[-2000:]))
            for node in ready:
                self._take(json.loads(node.recv(1 << 16)))

    def _take(self, event: dict[str, Any]) -> None:
        must("wrong" not in event, event.get("wrong"))
        self.events.append(event)
        if "restored" in event:
            is_kept = (event["restored"] or 0) >= self.safe
            must(is_kept, (event, self.safe, self.before[-12:], self._log[-3000:]))
            self.restored = event["restored"] or 0
        if event.get("rank") == 0:
            self.safe = max(self.safe, event.get("copied", 0), event.get("flushed", 0))

    def end(self, lost: int) -> None:
        """That node is lost, and with it all ranks end. What they had restored is compared."""
        for number in self._on:
            order = {"lose": True} if number == lost else {"kill": signal.SIGKILL}
            self._tell(number, order)
        for number in self._on:
            answer: dict[str, Any] = {}
            while "ended" not in answer:
                answer = json.loads(self.nodes[number].recv(1 << 16))
                if "ended" not in answer:
                    self._take(answer)
            statuses = [os.WTERMSIG(status) for status in answer["ended"]]
            must(statuses == [signal.SIGKILL] * len(self._on[number]), answer)
            if number == lost:
                must(answer["lost"]["before"] > 4, answer)
                must(answer["lost"]["after"] == 0, answer)
        self.nodes.pop(lost).close()

    @property
    def _log(self) -> str:
        return (self._folder / "stderr").read_text()

    def _tell(self, number: int, order: dict[str, Any]) -> None:
        self.nodes[number].send(json.dumps(order).encode())

    def close(self) -> None:
        for node in self.nodes.values():
            node.send(b'{"lose": true}')
        must(self._server.wait(ANSWER_S) == 0)
        for node in self.nodes.values():
            node.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path, NODES + ROUNDS)
    yield found
    found.close()


def all_of(key: str, size: int) -> Any:
    """All ranks have reported that."""
    return lambda events: len({each["rank"] for each in events if key in each}) == size


def at_least(count: int) -> Any:
    """So many reports have come."""
    return lambda events: len(events) >= count


@pytest.mark.thorough
def test_any_node_is_lost_and_nothing_else(cluster: Cluster) -> None:
    print(f"seed {SEED}, {ROUNDS} rounds")
    chance = random.Random(SEED)
    alive, fresh = list(range(NODES)), NODES
    order = list(range(NODES))
    chance.shuffle(order)
    for number in range(ROUNDS):
        kind, each = ("store", "directory")[number % 2], chance.choice((1, 2))
        flush = number % 2 == 0
        cluster.start(alive, each, kind, flush=flush)
        ranks = len(alive) * each
        if flush:
            cluster.until(all_of("done", ranks))
            newest = max(each["committed"] for each in cluster.events if "committed" in each)
            must(cluster.safe == newest, (cluster.safe, newest))  # nothing at all may be lost
        else:
            cluster.until(all_of("flushed", ranks))
            cluster.until(at_least(2 * ranks + chance.randrange(1, ranks * SAVES)))
            # Not a synchronisation: any moment is a good one to be lost.
            signal.sigtimedwait([], chance.random() * 0.05)
        lost = alive[order[number % NODES] % len(alive)]
        cluster.end(lost)
        alive.remove(lost)
        if len(alive) == 2:  # two are lost one after the other, before there are new ones
            alive, fresh = [*alive, fresh, fresh + 1], fresh + 2
    cluster.start(alive, 1, "store", flush=True, shared=True)
    cluster.until(all_of("done", len(alive)))
    noted = [level.name for level in recall(str(cluster.run)) if level.per_host]
    # From the hosts it went on to the run directory, which all of them share.
    with statehold.Checkpointer(cluster.run, coordination="none", **SMALL) as ckpt:
        got = restored(ckpt, is_first=False)
    assert got == cluster.safe
    assert noted == ["memory", "disk"]
