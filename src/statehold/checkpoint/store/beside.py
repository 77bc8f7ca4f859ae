"""Looking at files that a writer may replace or remove at any moment.

A job saves a step again by exchanging two directories, and retires steps by renaming them. Readers
take no lock. So a listed name may be gone when it is opened, and two files that were read one after
the other may belong to two saves.

Invariants: a failure counts only if the directory is still the same. If it is gone, there is
nothing to see. If it was replaced, the look begins again.
Not here: restores, on which several ranks agree (restoring, checkpoint/levels/saves).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Hashable
from typing import TypeVar

from statehold.errors import StateholdError, storage_error

__all__ = ["LOOKS_MAX", "directory_id", "look_beside_a_writer"]

T = TypeVar("T")

LOOKS_MAX = 100


def look_beside_a_writer(
    look: Callable[[], T], which: Callable[[], Hashable | None], what: str = ""
) -> T | None:
    """The result of `look`; None if there is nothing to look at any more.

    which: tells one save from another; None when it is gone. what: its name, for the error after
        LOOKS_MAX saves. Raises as `look` does if it failed on one and the same save.
    """
    for _ in range(LOOKS_MAX):
        before = which()
        if before is None:
            return None
        try:
            return look()
        except (StateholdError, OSError):
            if which() == before:
                raise
    raise storage_error("read a step that is replaced again and again", errno.ESTALE, what)


def directory_id(path: str) -> Hashable | None:
    """Tells the directory at `path` from a later one with its name; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
