"""Several ranks with Gloo on this host, started once for many checks: importing torch is slow.

A worker is a module-level function of an importable module: worker(rank, world_size, *args). What it
returns comes back by rank; an exception comes back as its traceback, and ends the test.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOIN_S = 240


def run_ranks(
    worker: Callable[..., Any], world_size: int, directory: Path, *args: Any
) -> list[Any]:
    """The results of worker(rank, world_size, *args) on `world_size` ranks, by rank."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    store = directory / f"store-{os.urandom(4).hex()}"
    ranks = [
        context.Process(target=_rank, args=(worker, rank, world_size, str(store), results, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, tuple[bool, Any]] = {}
    try:
        for process in ranks:
            process.join(JOIN_S)
        while not results.empty():
            rank, is_good, value = results.get()
            found[rank] = is_good, value
    finally:
        for process in ranks:
            process.kill()
    for rank in range(world_size):
        is_good, value = found.get(rank, (False, f"no answer; exit code {ranks[rank].exitcode}"))
        assert is_good, f"rank {rank}: {value}"
    return [found[rank][1] for rank in range(world_size)]


def _rank(
    worker: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    try:
        results.put((rank, True, worker(rank, world_size, *args)))
    except BaseException:  # CheckpointException is one
        results.put((rank, False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
