"""Room for the documents of a step, taken before its data is written.

A save goes to another level where the first one has no room (landing). That is decided while its
data file is opened, for what was copied out of a buffer cannot be written twice. So the files of
its manifest and record are made then, too, with their storage: writing them later cannot find the
level full.
Invariants: the room is that of the last such document and a part more; a document that has grown
beyond that may still find no room, and then the save fails by name.
Not here: what is in a document (steps), when it is written (store).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statehold._core import Fs

__all__ = ["Rooms"]

# A document grows with values in the state, such as lists of losses.
_MORE_BYTES = 64 << 10


class Rooms:
    """The room that documents of a store need, by their names. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._bytes: dict[str, int] = {}

    def written(self, name: str, nbytes: int) -> None:
        """A document of this name had so many bytes."""
        with self._guard:
            self._bytes[name] = nbytes

    def make(self, fs: Fs, folder: str, name: str, guess: Callable[[], int]) -> None:
        """Make the file of a document in `folder`; `guess` says how large the first one will be.
        Raises StorageError where there is no room."""
        with self._guard:
            known = self._bytes.get(name)
        nbytes = guess() if known is None else known
        room = nbytes + nbytes // 4 + _MORE_BYTES
        fs.open_write(f"{folder}/{name}", room).close()
