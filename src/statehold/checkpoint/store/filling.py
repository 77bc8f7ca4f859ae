"""A word in time where steps may fill a storage: any number of them stay, and few more have room.

No step is deleted that a user has not asked to delete, so by default all stay. Then the storage
must not be full before anybody has heard of it.
Invariants: it costs one question to the file system for each commit. The files of a step are looked
at when the first step is there, and again before a warning. A warning comes again only if there was
room in between. A file system that cannot be asked gives no warning.
Not here: which steps stay (retention); a storage that is full (save/level_choice).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from statehold.errors import StorageError
from statehold.io.memory_room import free_bytes
from statehold.units import format_bytes

if TYPE_CHECKING:
    from statehold.checkpoint.store.store import Store

# A warning comes if fewer steps than this have room.
STEPS_LEFT = 10


class Filling:
    """Looks at the storage of one store, on the rank that leads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._step_bytes = 0
        self._has_warned = False

    def warning(self) -> str:
        """The text of a warning, after a step was committed; empty if there is none."""
        store = self._store
        if store.retention.most is not None or store.fs.backend == "sim":
            return ""
        with contextlib.suppress(OSError, StorageError):
            left = self._steps_left()
            is_new, self._has_warned = not self._has_warned, left < STEPS_LEFT
            if is_new and self._has_warned:
                return (
                    f"{store.root} keeps {self._kept}, and its storage has room for about {left} "
                    f"more of {format_bytes(self._step_bytes)}: pass keep= to the Checkpointer, or "
                    "delete old steps with statehold prune"
                )
        return ""

    @property
    def _kept(self) -> str:
        return "all steps" if self._store.retention.keep is None else "any number of steps"

    def _steps_left(self) -> int:
        free = free_bytes(self._store.root)
        if free < STEPS_LEFT * self._step_bytes or not self._step_bytes:
            newest = self._store.newest()
            self._step_bytes = 0 if newest is None else own_bytes(self._store.where(newest))
        return free // max(self._step_bytes, 1)


def own_bytes(directory: str) -> int:
    """The bytes of files that no other step shares. Raises OSError."""
    with os.scandir(directory) as entries:
        found = [entry.stat(follow_symlinks=False) for entry in entries]
    return sum(each.st_size for each in found if each.st_nlink == 1)
