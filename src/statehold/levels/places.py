"""A level of a run, open: its steps, how they are read, and how a copy of one gets there.

    DirectoryPlace   a store (storage/store): memory, a local disk, a parallel file system
    ObjectPlace      an object store (storage/objects)

Holds: a copy is published by the place's own commit and not before all of it is there; whoever
reads never sees half of one. Several ranks copy their parts (`take`), and rank 0 alone prepares,
commits, abandons and retires.
Not here: which steps are copied, and when (promoting); the bytes of a copy (copying).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from statehold.levels.copying import Copied, Part, Source, write_copy
from statehold.storage.lock import RunLock

if TYPE_CHECKING:
    from statehold._core import Engine, Fs
    from statehold.storage.store import Store

__all__ = ["DirectoryPlace", "Place"]


class Place(Protocol):
    """What promotions and restores need of a level."""

    name: str

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        """A document of a step. Raises StorageError with ENOENT, or CorruptionError."""

    def find(self, step: int, name: str, nbytes: int) -> str:
        """The path of a data file of `nbytes`, brought near if it is far. Whether the file is there
        is found out by whoever opens it."""

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Keep a step while it is read."""

    def prepare(self, token: str | None) -> None:
        """Before the first change, again for nothing: make it, take it for this run, and clear what
        a crash has left. token: this job's, of which other ranks may be ahead."""

    def take(
        self,
        part: Part,
        source: Source,
        directory: str,
        step: int,
        attempt: str | None,
        before: Callable[[int], None],
    ) -> None:
        """Copy this rank's part of a step from `directory` of `source`; durable on return."""

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        """Publish a step of which all ranks' parts are there, and retire what is not kept."""

    def abandon(self, step: int, attempt: str | None) -> None:
        """Remove what was copied of a step that is not to be published."""

    def rewind(self, step: int) -> list[int]:
        """Give up every step newer than `step`; returns them."""

    def close(self) -> None:
        """Give back what prepare() took."""


class DirectoryPlace:
    """A store on a file system; `called` is the directory as the user has named it."""

    def __init__(
        self, name: str, store: Store, called: str, fs: Fs, engine: Callable[[], Engine]
    ) -> None:
        self.name = name
        self.store = store
        self._called = called
        self._fs = fs
        self._engine = engine
        self._lock: RunLock | None = None
        self._is_prepared = False

    def steps(self) -> list[int]:
        return self.store.steps()

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._fs.read_file(f"{self.store.path(step)}/{name}", max_bytes)

    def find(self, step: int, name: str, nbytes: int) -> str:
        return f"{self.store.path(step)}/{name}"

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self.store.protect(step)

    def prepare(self, token: str | None) -> None:
        if self._is_prepared:
            return
        self.store.create()
        if self.store.leads:
            self._lock = self._lock or RunLock(self._called, in_memory=self._fs.backend == "sim")
            self.store.recover(token)
        self._is_prepared = True

    def take(
        self,
        part: Part,
        source: Source,
        directory: str,
        step: int,
        attempt: str | None,
        before: Callable[[int], None],
    ) -> None:
        self.store.begin(step, attempt)
        for file in part.files:
            target, _ = self.store.data_file(step, file.name, file.bytes, attempt)
            opened = source.open_read(f"{directory}/{file.name}")
            try:
                write_copy(self._engine(), file, opened, target, before)
            finally:
                opened.close()
        if part.record is not None and attempt is not None:
            self.store.seal(step, attempt, *part.record)

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        self.store.commit(Copied(step, manifest), attempt)
        self.store.retain()

    def abandon(self, step: int, attempt: str | None) -> None:
        self.store.abandon(step, attempt)

    def rewind(self, step: int) -> list[int]:
        return self.store.rewind(step)

    def close(self) -> None:
        if self._lock is not None:
            try:
                self.store.drop_spare()
            finally:
                self._lock.release()
