"""The directory of a level, also of one without a path.

Not here: the options of a level (specs), object stores, which have no directory.
"""

from __future__ import annotations

import os

from statehold.checkpoint.levels.memory import COPIES_SUFFIX, OF_LEVEL, memory_root
from statehold.checkpoint.levels.owners import Identity, owner_at
from statehold.checkpoint.levels.specs import Directory, Level, Memory
from statehold.observe.background_log import log_once
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
    if not isinstance(level, Memory):
        return run
    found = memory_root(run)
    return found if os.path.isdir(found) else _before_a_move(run) or found


def _before_a_move(run: str) -> str | None:
    """The memory of a run whose directory was renamed: it is called after the path before.

    The run stays there. Otherwise steps that are only in memory would be lost.
    """
    if (owner := owner_at(run)) is None or (there := owner_at(memory_root(owner.run))) is None:
        return None
    found = memory_root(owner.run)
    if not Identity(run, draws=False).owns(there):
        return None
    log_once(f"{run} was {owner.run} before. Its memory level stays in {found}")
    return found
