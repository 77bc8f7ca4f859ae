"""Who survives the death of a replica in bench.resilience.kill, and how each of them is started.

Invariants: what was started has ended when its context ends.
Not here: what a replica does (killed), what is measured (kill).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench import harness
from bench.resilience.killed.work import EARLY, LATE, Order
from bench.resilience.processes import TO_NOWHERE, Processes, coordinated, ended

KILLED = "bench.resilience.killed"

# Starts the replicas of an order; `peers` is the interpreter that has the peers.
Started = contextlib.AbstractContextManager[Processes]


class Subject(NamedTuple):
    """module: that `peers` must be able to import, or None."""

    name: str
    moment: str
    start: Callable[[Order, str], Started]
    module: str | None = None


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _peer(words: Sequence[object], **environment: str) -> subprocess.Popen[str]:
    """A program of the environment of the peers, which finds this tree."""
    return subprocess.Popen(
        [*map(str, words)],
        cwd=harness.ROOT,
        env=os.environ | {"PYTHONPATH": str(harness.ROOT)} | environment,
        text=True,
        **TO_NOWHERE,
    )


def _text(order: Order, **changes: Any) -> str:
    return json.dumps(dataclasses.asdict(dataclasses.replace(order, **changes)))


@contextlib.contextmanager
def _statehold(order: Order, _: str) -> Iterator[Processes]:
    with coordinated(order.replicas) as address:
        told = _text(order, coordinator=address)
        with ended(
            [
                harness.start(f"{KILLED}.with_statehold", told, replica, **TO_NOWHERE)
                for replica in range(order.replicas)
            ]
        ) as replicas:
            yield replicas


@contextlib.contextmanager
def _torchft(order: Order, peers: str) -> Iterator[Processes]:
    address = f"127.0.0.1:{_port()}"
    lighthouse = os.path.join(os.path.dirname(peers), "torchft_lighthouse")
    with ended([_peer([lighthouse, "--bind", address, "--min_replicas", 1])]):
        told = _text(order, coordinator=f"http://{address}")
        with ended(
            [
                _peer([peers, "-m", f"{KILLED}.with_torchft", told, replica])
                for replica in range(order.replicas)
            ]
        ) as replicas:
            yield replicas


def _torchrun(order: Order, _: str) -> Started:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", order.replicas]
    meeting = ["--standalone", "--max-restarts", 1]
    words = [*launcher, *meeting, "-m", f"{KILLED}.with_torchrun", _text(order)]
    return ended([_peer(words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")])


def _ulfm(order: Order, peers: str) -> Started:
    launcher = [os.path.join(os.path.dirname(peers), "mpirun"), "--with-ft", "ulfm"]
    places = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", order.replicas]
    waiting = ["--mca", "mpi_yield_when_idle", 1]
    words = [*launcher, *places, *waiting, peers, "-m", f"{KILLED}.with_ulfm", _text(order)]
    return ended([_peer(words)])


SUBJECTS = (
    Subject("statehold, exact", EARLY, _statehold),
    Subject("statehold, exact", LATE, _statehold),
    Subject("torchft", LATE, _torchft, "torchft"),
    Subject("torchrun, restart", LATE, _torchrun),
    Subject("MPI ULFM, no recovery", LATE, _ulfm, "mpi4py"),
)
