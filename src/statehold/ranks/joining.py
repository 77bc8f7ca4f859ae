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
    store = distributed.distributed_c10d._get_default_store()
    membership = Membership(distributed.get_rank(), world_size)
    return Peers(StoreBoard(store, run), membership, timeout_s)


def _through_directory(run: str, timeout_s: float) -> Peers | None:
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if world_size <= 1:
        return None
    if rank >= world_size:
        raise UsageError(
            "the rank is outside its world", facts={"RANK": rank, "WORLD_SIZE": world_size}
        )
    board = DirectoryBoard(os.path.join(run, PEERS_NAME))
    return Peers(board, Membership(rank, world_size), timeout_s)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(
            f'coordination="directory" needs {name} in the environment',
            facts={
                "expected": "a whole number, as torchrun and SLURM wrappers set it",
                "got": repr(text),
            },
        )
    return int(text)
