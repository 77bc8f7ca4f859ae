"""Space for the documents of a step, taken before its data is written.

A save goes to another level if the first one has no space (save/level_choice). That is decided
while its data file is opened, because bytes that were copied out of a buffer cannot be written
twice. So the files of its manifest and record are made then, too, with their storage. Writing them
later cannot find the level full.
Invariants: the space is that of the last such document and a part more. A document that has grown
beyond that may still find no space, and then the save fails by name.
Not here: the content of a document (format), when it is written (store).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statehold._core import Fs

# A document grows with values in the state, such as lists of losses.
_MORE_BYTES = 64 << 10


class Rooms:
    """The space that documents of a store need, by their names. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._bytes: dict[str, int] = {}

    def written(self, name: str, nbytes: int) -> None:
        """Note that a document of this name had so many bytes."""
        with self._guard:
            self._bytes[name] = nbytes

    def make(self, fs: Fs, folder: str, name: str, guess: Callable[[], int]) -> None:
        """Make the file of a document in `folder`; `guess` is the expected size of the first one.

        Raises StorageError if there is no space.
        """
        with self._guard:
            known = self._bytes.get(name)
        nbytes = guess() if known is None else known
        room = nbytes + nbytes // 4 + _MORE_BYTES
        fs.open_write(f"{folder}/{name}", room).close()
