"""How a process finds the other ranks of its job, from the option `coordination`.

Invariants: a job of one rank has no peers. This looks at torch only if the program has imported it.
Not here: the messages of the ranks (peers), how notes travel (board).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from statehold.errors import UsageError
from statehold.options import Options
from statehold.ranks.board import DirectoryBoard, StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers

PEERS_NAME = ".peers"
# The rank and the number of ranks, as torchrun, Open MPI, MPICH and SLURM set them. The launcher
# that starts the ranks comes first.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def join(run: str, options: Options) -> Peers | None:
    """The other ranks that use the run directory `run`; None for a process that is alone."""
    if options.coordination == "none":
        return None
    if options.coordination == "directory":
        return _through_directory(run, options.peer_timeout_s)
    return _through_store(run, options.coordination == "store", options.peer_timeout_s)


def _through_store(run: str, required: bool, timeout_s: float) -> Peers | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if required:
            raise UsageError(
                'coordination="store" needs the store of torch.distributed',
                hint="call torch.distributed.init_process_group() before the first save or restore",
            )
        return None
    world_size = distributed.get_world_size()
    if world_size == 1:
        return None
    store = distributed.group.WORLD.get_group_store()
    membership = Membership(distributed.get_rank(), world_size)
    return Peers(StoreBoard(store, run), membership, timeout_s)


def _through_directory(run: str, timeout_s: float) -> Peers | None:
    found = launched()
    if found is None:
        names = [each for pair in _LAUNCHERS for each in pair if each in os.environ]
        got = ", ".join(f"{each}={os.environ[each]!r}" for each in names)
        raise UsageError(
            'coordination="directory" needs the rank and the number of ranks in the environment',
            facts={
                "expected": "whole numbers, as torchrun, srun and mpirun set them",
                "got": got or "none of these",
            },
        )
    rank, world_size = found
    if world_size <= 1:
        return None
    if rank >= world_size:
        facts = {"rank": rank, "number of ranks": world_size}
        raise UsageError("the rank is outside its world", facts=facts)
    board = DirectoryBoard(os.path.join(run, PEERS_NAME))
    return Peers(board, Membership(rank, world_size), timeout_s)


def launched() -> tuple[int, int] | None:
    """The rank of this process and the number of ranks, as its launcher says in the environment."""
    for names in _LAUNCHERS:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size)
    return None
