"""Where steps are: one interface to read them, and the directories that have it.

    Shelf             steps, wherever they are
    DirectoryShelf    the steps of a run directory, or of a level that is one
    StepShelf         one step, in a directory of any name

An object store (objects), a host of the job (checkpoint/levels/hosts/place) and the nearest intact
copy of several (nearest) are shelves, too. The code that reads a step asks a shelf, and knows
nothing else about where the step is.
Invariants: a shelf changes nothing. A step that is listed may be gone when it is read: a job may
retire it, or save it again, meanwhile. A step that is being replaced is read at the name that it
has now (publish).
Not here: what writes steps (store, target).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from statehold._core import File, Fs
from statehold.errors import StorageError, no_such_step
from statehold.format.entries import DOCUMENT_BYTES_MAX
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME, SavedStep, open_step
from statehold.io.objects.parallel import Extent
from statehold.observe.background_log import log_once
from statehold.steps.directories import standing_step_of
from statehold.steps.publish import directory_id, entries_of, read_standing, where

Ranges = Sequence[tuple[int, int]] | None
T = TypeVar("T")


class ShelfFile(Protocol):
    """An open data file of a step."""

    def read_into(self, memory: memoryview, offset: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A data file that lies elsewhere: each read fetches. fetch: fills memory with ranges."""

    fetch: Callable[[Sequence[Extent]], None]

    def read_into(self, memory: memoryview, offset: int) -> None:
        self.fetch([(offset, memory)])

    def close(self) -> None:
        """Connections belong to all files of a place."""


class Shelf(ABC):
    """Steps, to be read. name: of the shelf, for messages."""

    name: str

    @abstractmethod
    def steps(self) -> list[int]:
        """The committed steps, oldest first."""

    @abstractmethod
    def path(self, step: int) -> str:
        """Where a step is, for messages."""

    @abstractmethod
    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        """A document of a step. Raises StorageError with ENOENT, or CorruptionError."""

    def manifest(self, step: int) -> bytes:
        """The manifest of a step. Raises as read() does."""
        return self.read(step, MANIFEST_NAME, DOCUMENT_BYTES_MAX)

    @abstractmethod
    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        """The path of a data file of `nbytes`.

        A far file is fetched, and only its `ranges` (None: all) need be right. For another file,
        the code that opens it finds out whether it exists.
        """

    @abstractmethod
    def open_file(self, step: int, name: str) -> ShelfFile:
        """A data file, to be read once from begin to end: nothing is fetched before."""

    def open_view(self, step: int, name: str, nbytes: int) -> File | None:
        """A data file of `nbytes` as memory of this host, in its place; None elsewhere."""
        return None

    def holds(self, step: int, name: str) -> bool:
        """Whether this shelf should have a file of one of its steps; if not, nobody asks for it."""
        return True

    def has_file(self, step: int, name: str) -> bool:
        """Whether a file whose path find() returned exists now.

        The step may have been at another path for a moment. False if steps have only one path.
        """
        return False

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Keep a step, and its fetched files, while it is read."""
        return contextlib.nullcontext()

    def open(self, step: int, rank: int | None = None, world_size: int = 1) -> SavedStep:
        """A committed step, as `rank` of `world_size` ranks sees it (None: one rank)."""

        def read(path: str, max_bytes: int) -> bytes:
            return self.read(step, path.rpartition("/")[2], max_bytes)

        return open_step(read, self.path(step), step, rank or 0, world_size)


class Through(Shelf):
    """The steps of another shelf, read through it."""

    def __init__(self, name: str, shelf: Shelf) -> None:
        self.name = name
        self._shelf = shelf

    def steps(self) -> list[int]:
        return self._shelf.steps()

    def path(self, step: int) -> str:
        return self._shelf.path(step)

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._shelf.read(step, name, max_bytes)

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        return self._shelf.find(step, name, nbytes, ranges)

    def open_file(self, step: int, name: str) -> ShelfFile:
        return self._shelf.open_file(step, name)

    def open_view(self, step: int, name: str, nbytes: int) -> File | None:
        return self._shelf.open_view(step, name, nbytes)

    def has_file(self, step: int, name: str) -> bool:
        return self._shelf.has_file(step, name)

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._shelf.protect(step)


class DirectoryShelf(Shelf):
    """The committed steps in the directory `root`, on the file system `fs`, which a test may wrap.

    A thread of its own may use it.
    """

    def __init__(self, fs: Fs, root: str, name: str = "") -> None:
        self.fs = fs
        self.root = root.rstrip("/") or "/"
        self.name = name or self.root

    def path(self, step: int, suffix: str = "") -> str:
        """The directory of a step; `suffix` is "", ".partial", ".retired" or ".corrupt"."""
        return f"{self.root}/step-{step:012d}{suffix}"

    def where(self, step: int) -> str:
        """The directory that a committed step is in now: path(step), or step-n.replaced."""
        return where(self.fs, self.path(step))

    def steps(self) -> list[int]:
        found = set[int]()
        for name, is_dir in entries_of(self.fs, self.root):
            step = standing_step_of(name)
            if step is not None and is_dir:
                found.add(step)
            elif step is not None:
                log_once(
                    f"{self.root}/{name} is a link or a file, so it does not count as a step. "
                    "Move the directory of the step back to this name"
                )
        return sorted(found)

    def newest(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.steps(), default=None)

    def names(self, step: int) -> list[str] | None:
        """The files of a committed step; None if it is no longer committed."""
        try:
            entries = self._at(step, self.fs.listdir)
        except StorageError:
            if self.fs.is_dir(self.where(step)):
                raise
            return None
        return [name for name, is_dir in entries if not is_dir]

    def stamp(self, step: int) -> Hashable | None:
        """Tells the save of a step here from other saves; None if there is none."""
        return directory_id(self.where(step))

    def open(self, step: int, rank: int | None = None, world_size: int = 1) -> SavedStep:
        if not self.fs.is_dir(self.where(step)):
            raise no_such_step(step, self.root, self.steps())

        read = self.fs.read_file
        return self._at(step, lambda place: open_step(read, place, step, rank or 0, world_size))

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._at(step, lambda place: self.fs.read_file(f"{place}/{name}", max_bytes))

    def _at(self, step: int, look: Callable[[str], T]) -> T:
        """The result of `look` at the directory that a step is in."""
        return read_standing(self.fs, self.path(step), look)

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        return f"{self.where(step)}/{name}"

    def open_file(self, step: int, name: str) -> ShelfFile:
        return self._at(step, lambda place: self.fs.open_read(f"{place}/{name}"))

    def open_view(self, step: int, name: str, nbytes: int) -> File | None:
        return self._at(step, lambda place: self.fs.open_view(f"{place}/{name}", nbytes))

    def has_file(self, step: int, name: str) -> bool:
        return self.fs.stat_bytes(f"{self.where(step)}/{name}") is not None


class StepShelf(DirectoryShelf):
    """The step in a directory, which need not be named like one."""

    @cached_property
    def step(self) -> int:
        """Its number, by its manifest. Raises as reading that does."""
        raw = self.manifest(0)
        return Manifest.decode(raw, f"{self.root}/{MANIFEST_NAME}").step

    def steps(self) -> list[int]:
        return [self.step]

    def path(self, step: int, suffix: str = "") -> str:
        return f"{self.root}{suffix}"
