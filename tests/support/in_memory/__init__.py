"""A simulated disk, and ranks as threads of one process.

`SimFs` is a file system in memory with seeded faults, and crashes that lose unsynced data.
`checkpointer_on` returns a Checkpointer on it, `ranks_on` one for each rank of a job. A test that
injects faults must check `fired`: a fault that did not fire tests nothing. `MemoryBoard` is the
board of ranks that are threads of one process. With `ranks_on_hosts`, ranks have disks of their
own, and read each other's files over a `MemoryNetwork`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statehold._sim import SimFs
from statehold.checkpoint.checkpointer import Checkpointer, borrowed_by
from statehold.testing import checkpointer_on, ranks_that_meet
from support.in_memory.board import MemoryBoard
from support.in_memory.network import MemoryNetwork

if TYPE_CHECKING:
    from statehold._core import Fs

__all__ = ["MemoryBoard", "MemoryNetwork", "SimFs", "checkpointer_on", "ranks_on", "ranks_on_hosts"]


def ranks_on(
    fs: Fs, run: str | os.PathLike[str], world_size: int, **options: Any
) -> list[Checkpointer]:
    """As that of statehold.testing, on a board whose waits a scheduler of turns sees."""
    return ranks_that_meet(MemoryBoard(), [fs] * world_size, run, **options)


def ranks_on_hosts(
    disks: Sequence[Fs], run: str | os.PathLike[str], network: MemoryNetwork, **options: Any
) -> list[Checkpointer]:
    """A Checkpointer for each rank of a job; ranks with the same disk are on the same host."""
    ckpts = ranks_that_meet(MemoryBoard(), disks, run, **options)
    for ckpt in ckpts:
        borrowed_by(ckpt).exchange = network.exchange()
    return ckpts
