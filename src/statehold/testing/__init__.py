"""Tools for testing what is built on statehold: a simulated disk, ranks as threads.

`SimFs` is a file system in memory with seeded faults and crashes that lose what was not synced;
`checkpointer_on` gives a Checkpointer that lives on it. A test that injects faults has to look at
`fired`: a fault that did not fire tests nothing. `MemoryBoard` is where the ranks of a job that
are threads of one process meet.
"""

from __future__ import annotations

import os
from typing import Any

from statehold._core import Fs, SimFs
from statehold.checkpointer import Checkpointer
from statehold.testing.memory_board import MemoryBoard

__all__ = ["MemoryBoard", "SimFs", "checkpointer_on"]


def checkpointer_on(fs: Fs, run: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """A Checkpointer whose run directory lies on `fs`, which outlives it."""
    ckpt = Checkpointer(run, **options)
    ckpt._borrowed_fs = fs
    return ckpt
