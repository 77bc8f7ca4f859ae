"""A level of several hosts, as one place for each host: for reading, and as a source.

    StoreView   the steps of one store, here or on another host, that it has a part of
    Scattered   a step, each file from the first view that has it

Invariants: readers see only steps that are whole over all hosts, under one manifest. The name of a
view says which host it is. Far files are fetched before they are read.
Not here: which steps are whole (census), how bytes come from another host (remote).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from statehold.checkpoint.levels.hosts.census import Holder, PlacedFiles, holds_file
from statehold.checkpoint.levels.places import Below
from statehold.errors import CorruptionError, MissingFileError, StorageError, storage_error

if TYPE_CHECKING:
    from statehold._core import File, Fs
    from statehold.checkpoint.levels.copying import Source, SourceFile
    from statehold.checkpoint.store.store import Store

Ranges = Sequence[tuple[int, int]] | None


def step_directory(step: int) -> str:
    """The name of the directory of a step, below any root."""
    return f"step-{step:012d}"


class FarSource(Protocol):
    """A `Source` on another host, which can fetch several ranges at once."""

    def read_file(self, path: str, max_bytes: int) -> bytes: ...
    def open_read(self, path: str) -> SourceFile: ...
    def fetch(self, path: str, targets: Sequence[tuple[int, memoryview]]) -> None: ...


class Nearby(Protocol):
    """The place for fetched files of other hosts; as near_files.NearFiles."""

    def bring(
        self,
        step: int,
        name: str,
        nbytes: int,
        needed: Ranges,
        fetch: Callable[[Sequence[tuple[int, memoryview]]], None],
    ) -> str: ...
    def reading(self, step: int) -> contextlib.AbstractContextManager[None]: ...
    def close(self) -> None: ...


class Reach(Protocol):
    """How a view reads. Paths are those of a Source below the root of the store.

    root: the root of the store, for messages.
    """

    source: Source
    root: str

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges) -> str:
        """As Place.find."""

    def has_file(self, step: int, name: str) -> bool:
        """As Place.has_file."""

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Keep a step while it is read."""


class Near:
    """A store of this host, on the file system `fs`."""

    def __init__(self, fs: Fs, store: Store) -> None:
        self._store = store
        self.root = store.root
        self.source: Source = Below(fs, store.root)

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges) -> str:
        return f"{self._store.where(step)}/{name}"

    def has_file(self, step: int, name: str) -> bool:
        return self._store.has_file(step, name)

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._store.protect(step)


class Far:
    """A store of another host."""

    def __init__(self, source: FarSource, near: Nearby, root: str) -> None:
        self.root = root
        self.source: Source = source
        self._far = source
        self._near = near

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges) -> str:
        def fetch(targets: Sequence[tuple[int, memoryview]]) -> None:
            self._far.fetch(f"{step_directory(step)}/{name}", targets)

        return self._near.bring(step, name, nbytes, ranges, fetch)

    def has_file(self, step: int, name: str) -> bool:
        return False  # the path was that of a copy near here

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._near.reading(step)  # there, its own ranks keep it, because they restore, too


class StoreView:
    """One store of a level; `placed`: the places of the files of each whole step."""

    def __init__(
        self, name: str, host: int, is_copy: bool, placed: Mapping[int, PlacedFiles], reach: Reach
    ) -> None:
        self.name = name
        self._reach = reach
        self._held = {
            step: holder
            for step, each in placed.items()
            for holder in each.holders
            if (holder.host, holder.is_copy) == (host, is_copy)
        }

    def steps(self) -> list[int]:
        return sorted(self._held)

    def holds(self, step: int, name: str) -> bool:
        """Whether the file should be here."""
        holder: Holder | None = self._held.get(step)
        return holder is not None and holds_file(holder, name)

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._reach.source.read_file(f"{step_directory(step)}/{name}", max_bytes)

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        return self._reach.find(step, name, nbytes, ranges)

    def has_file(self, step: int, name: str) -> bool:
        return self._reach.has_file(step, name)

    def path(self, step: int) -> str:
        return f"{self._reach.root}/{step_directory(step)}"

    def open_view(self, step: int, name: str, nbytes: int) -> File:
        """A data file as memory, in its place in this host's memory."""
        source = self._reach.source
        if not isinstance(source, Below):
            raise storage_error("map a file of another host into memory", errno.EOPNOTSUPP, name)
        return source.open_view(f"{step_directory(step)}/{name}", nbytes)

    def open(self, step: int, name: str) -> SourceFile:
        return self._reach.source.open_read(f"{step_directory(step)}/{name}")

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._reach.protect(step)


class Scattered:
    """A `Source` of one step: each file from the first of `views` that has it; paths are names."""

    def __init__(self, step: int, views: Sequence[StoreView]) -> None:
        self._step = step
        self._views = views

    def read_file(self, path: str, max_bytes: int) -> bytes:
        return self._first(path, lambda view: view.read(self._step, path, max_bytes))

    def open_read(self, path: str) -> SourceFile:
        having = list(self._having(path))
        if len(having) == 1:
            return having[0].open(self._step, path)
        return _Anywhere(self._step, path, having)

    def open_view(self, path: str, nbytes: int) -> File:
        for view in self._having(path):
            return view.open_view(self._step, path, nbytes)
        raise _nowhere(self._step, path)

    def _first(self, name: str, act: Callable[[StoreView], bytes]) -> bytes:
        failure: StorageError | CorruptionError | None = None
        for view in self._having(name):
            try:
                return act(view)
            except (StorageError, CorruptionError) as error:
                failure = failure or error
        raise failure or _nowhere(self._step, name)

    def _having(self, name: str) -> Iterator[StoreView]:
        return (view for view in self._views if view.holds(self._step, name))


class _Anywhere:
    """A data file that several views have; if one cannot be read, the next is asked."""

    def __init__(self, step: int, name: str, views: list[StoreView]) -> None:
        self._step = step
        self._name = name
        self._views = views
        self._opened: SourceFile | None = None

    def read_into(self, memory: memoryview, offset: int) -> None:
        failure: StorageError | CorruptionError = _nowhere(self._step, self._name)
        while self._views:
            try:
                if self._opened is None:
                    self._opened = self._views[0].open(self._step, self._name)
                self._opened.read_into(memory, offset)
                return
            except (StorageError, CorruptionError) as error:
                failure = error
                self.close()
                self._views.pop(0)
        raise failure

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _nowhere(step: int, name: str) -> MissingFileError:
    facts = {"file": name, "step": step}
    return MissingFileError("no host of this job has this file of the step", facts=facts)
