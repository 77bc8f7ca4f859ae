"""The place of the steps of a memory level: a directory of this run in the directory of this user
below /dev/shm.

A process that opens the same run on the same host finds the directory again, until the host
restarts.
"""

from __future__ import annotations

import hashlib
import os

from statehold.process.host_memory import SHARED_MEMORY, check_home, home, home_path
from statehold.process.ownership import make_own_directory

OF_LEVEL = "of a memory level"
COPIES_SUFFIX = "-copies"


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
