"""Starts the processes of a job on this machine: its ranks as torchrun would, or one by one.

Owns the processes, and the store through which ranks meet. Invariants: `run` leaves nothing
running; a rank that dies ends nobody else, because who is left shall say so itself. The processes
are forked by a server that has imported torch, so a job starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore

# The last one is what torch imports when deterministic algorithms are asked for.
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "statehold",
    "statehold.resilience.replicas",
    "torch._inductor.config",
)
TIMEOUT_S = 600.0


def run(size: int, body: Callable[..., None], *arguments: Any) -> list[int]:
    """Call body(*arguments) in `size` processes; their exit statuses, by rank.

    A rank that has not ended by the limit is killed, and its status is that of SIGKILL.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        start(_rank, _environment(rank, size, store.port), body, arguments) for rank in range(size)
    ]
    try:
        until = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
    finally:
        end(ranks)
    return [process.exitcode or 0 for process in ranks]


def start(body: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call body(*arguments) in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=body, args=arguments)
    process.start()
    return process


def end(processes: Sequence[BaseProcess]) -> None:
    """Kill those that have not ended."""
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here already: no rank hosts it
    }


def _rank(environment: dict[str, str], body: Callable[..., None], arguments: Any) -> None:
    os.environ.update(environment)
    body(*arguments)
