"""For tests of your own: the ranks of a job as threads of one process, without a launcher.

    ckpts = ranks_on(None, tmp_path / "run", 4)
    # on a thread for each rank:
    ckpts[rank].save(step, state).wait("committed")

A checkout has a simulated disk, too: `statehold._sim.SimFs` injects seeded faults, and loses what
was not synced in a crash.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in its __all__

from statehold._core import Fs
from statehold.checkpoint.checkpointer import Checkpointer, borrowed_by
from statehold.options import Options
from statehold.ranks.board import Board, StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers

__all__ = ["ranks_on"]


def checkpointer_on(
    fs: Fs | None, run: str | os.PathLike[str], peers: Peers | None = None, **options: Any
) -> Checkpointer:
    """A Checkpointer whose run directory and levels lie on `fs`, which outlives it.

    peers: makes it one rank of several.
    """
    ckpt = Checkpointer(run, **options)
    borrowed = borrowed_by(ckpt)
    borrowed.fs, borrowed.peers = fs, peers
    return ckpt


def ranks_on(
    fs: Fs | None, run: str | os.PathLike[str], world_size: int, **options: Any
) -> list[Checkpointer]:
    """A Checkpointer for each rank of a job. Each rank needs a thread of its own.

    Args:
        fs: where the run directory and the levels lie. None is the file system of this host.
        run: the run directory.
        world_size: the number of ranks.
        **options: those of Checkpointer. Give each level a path.
    """
    return ranks_that_meet(StoreBoard(HashStore(), str(run)), [fs] * world_size, run, **options)


def ranks_that_meet(
    board: Board, disks: Sequence[Fs | None], run: str | os.PathLike[str], **options: Any
) -> list[Checkpointer]:
    """A Checkpointer for each rank of a job, on the disk of that rank."""
    timeout_s = options.get("peer_timeout_s", Options().peer_timeout_s)
    return [
        checkpointer_on(fs, run, Peers(board, Membership(rank, len(disks)), timeout_s), **options)
        for rank, fs in enumerate(disks)
    ]
