"""The directory of a level, also of one without a path.

Not here: the options of a level (specs), object stores, which have no directory.
"""

from __future__ import annotations

import os

from statehold.checkpoint.levels.memory import COPIES_SUFFIX, OF_LEVEL, memory_root
from statehold.checkpoint.levels.specs import Directory, Level, Memory
from statehold.process.ownership import check_own_directory


def directory_of(level: Level, run: str) -> str:
    """The directory of a level. Nothing is made.

    Raises StorageError if another user may write to that of a memory level, or to what is beside it
    for copies of other hosts.
    """
    path = level.path if isinstance(level, Directory | Memory) else None
    if path is not None:
        found = os.path.abspath(os.fspath(path))
        if isinstance(level, Memory):
            for each in (found, found + COPIES_SUFFIX):
                check_own_directory(each, OF_LEVEL)
        return found
    return memory_root(run) if isinstance(level, Memory) else run
