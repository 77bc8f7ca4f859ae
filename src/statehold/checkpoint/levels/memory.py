"""The directory of a level, also of one without a path.

The steps of a memory level without a path lie in a directory of this run, in the directory of this
user below /dev/shm. A process that opens the same run on the same host finds the directory again,
until the host restarts.
Not here: the options of a level (specs), object stores, which have no directory.
"""

from __future__ import annotations

import hashlib
import os

from statehold.checkpoint.levels.specs import Directory, Level, Memory
from statehold.observe.background_log import log_once
from statehold.process.host_memory import SHARED_MEMORY, check_home, home, home_path
from statehold.process.ownership import check_own_directory, make_own_directory
from statehold.steps.owners import Identity, owner_at

OF_LEVEL = "of a memory level"
COPIES_SUFFIX = "-copies"


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


def memory_root(run: str, base: str = SHARED_MEMORY) -> str:
    """The directory for the run directory `run`. Nothing is made.

    Raises StorageError if something else is where its parent belongs.
    """
    check_home(base)
    return memory_path(run, base)


def make_private(root: str) -> None:
    """Make the directory of a memory level. Raises StorageError if another user has made it."""
    if os.path.dirname(root) == home_path():
        home()
    make_own_directory(root, OF_LEVEL)


def memory_path(run: str, base: str = SHARED_MEMORY) -> str:
    """The same, unchecked."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()[:16]
    return os.path.join(home_path(base), name)
