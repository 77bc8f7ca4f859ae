"""The directory of a level, also of one without a path.

Not here: the options of a level (specs), object stores, which have no directory.
"""

from __future__ import annotations

import os

from statehold.checkpoint.levels.memory import memory_root
from statehold.checkpoint.levels.specs import Directory, Level, Memory


def directory_of(level: Level, run: str) -> str:
    """The directory of a level. Nothing is made."""
    path = level.path if isinstance(level, Directory | Memory) else None
    if path is not None:
        return os.path.abspath(os.fspath(path))
    return memory_root(run) if isinstance(level, Memory) else run
