"""Several ranks with Gloo on this host, started once for many checks: importing torch is slow.

A worker is a module-level function of an importable module: worker(rank, world_size, *args). What
it returns comes back by rank; an exception comes back as its traceback, and ends the test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.faults import must
from support.forked import forked

JOIN_S = 250  # below the limit of a test


def run_ranks(
    worker: Callable[..., Any], world_size: int, directory: Path, *args: Any
) -> list[Any]:
    """The results of worker(rank, world_size, *args) on `world_size` ranks, by rank."""
    own = directory / f"ranks-{os.urandom(4).hex()}"
    own.mkdir()
    with started_ranks(worker, world_size, own, *args) as ranks:
        for process in ranks:
            process.join(JOIN_S)
    return [_result(own / str(rank), ranks[rank]) for rank in range(world_size)]


@contextlib.contextmanager
def started_ranks(
    worker: Callable[..., Any], world_size: int, own: Path, *args: Any
) -> Iterator[list[Any]]:
    """The processes of these ranks, which meet in `own`. None outlives the context."""
    ranks = [
        forked().Process(target=_rank, args=(worker, rank, world_size, str(own), args))
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _result(path: Path, process: Any) -> Any:
    must(path.exists(), f"{process.name} ended with {process.exitcode} and no result")
    is_good, value = pickle.loads(path.read_bytes())
    must(is_good, value)
    return value


def _rank(
    worker: Callable[..., Any], rank: int, world_size: int, own: str, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(JOIN_S - 10, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{own}/store", rank=rank, world_size=world_size
    )
    try:
        result = True, worker(rank, world_size, *args)
    except BaseException:  # CheckpointException is one
        result = False, traceback.format_exc()
    Path(own, str(rank)).write_bytes(pickle.dumps(result))
    if dist.is_initialized():  # a worker may have left
        dist.destroy_process_group()
