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
import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from statehold import _core
from statehold.errors import StorageError
from statehold.levels.copying import Copied, Copy, DataFile, write_copy
from statehold.storage.lock import RunLock
from statehold.storage.unfinished import Unfinished, copy_attempt

if TYPE_CHECKING:
    from statehold._core import Engine, Fs
    from statehold.storage.store import Store

__all__ = ["CopyEngine", "DirectoryPlace", "Place"]

# What copies to one level take of the memory, however large the files are.
COPY_BUFFERS = 4


class Place(Protocol):
    """What promotions and restores need of a level."""

    name: str

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        """A document of a step. Raises StorageError with ENOENT, or CorruptionError."""

    def find(
        self, step: int, name: str, nbytes: int, ranges: Sequence[tuple[int, int]] | None = None
    ) -> str:
        """The path of a data file of `nbytes`. One that is far is brought near, as a file of which
        only `ranges` (None: all) need be right; of one that is not, whoever opens it finds out
        whether it is there."""

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Keep a step, and what is brought near of it, while it is read."""

    def prepare(self, token: str | None) -> None:
        """Before the first change, again for nothing: make it, take it for this run, and clear what
        a crash has left. token: this job's, of which other ranks may be ahead."""

    def take(self, copy: Copy) -> None:
        """Copy a rank's part of a step; durable on return. What an earlier copy of the same
        manifest has left is verified, and not copied again."""

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        """Publish a step of which all ranks' parts are there."""

    def retain(self) -> None:
        """Retire what is no longer kept."""

    def drop(self, attempt: str | None) -> None:
        """Remove what was copied and not published, and is not to be gone on with."""

    def rewind(self, step: int) -> list[int]:
        """Give up every step newer than `step`; returns them."""

    def close(self) -> None:
        """Give back what prepare() took."""


class CopyEngine:
    """The engine that copies to one level, opened when there is something to copy: it has buffers
    of its own, so that a copy never takes those that a save, or a faster level, waits for."""

    def __init__(self, fs: Fs, buffer_bytes: int) -> None:
        self._fs = fs
        self._buffer_bytes = buffer_bytes
        self._engine: Engine | None = None

    def __call__(self) -> Engine:
        if self._engine is None:
            staging = COPY_BUFFERS * self._buffer_bytes
            self._engine = _core.Engine(self._fs, staging, self._buffer_bytes, 1)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class DirectoryPlace:
    """A store on a file system; `called` is the directory as the user has named it, of_host: other
    hosts cannot see it, yields: an agent opens it (storage/lock). Thread-safe: it is prepared by
    whoever comes first, the trainer or a promotion."""

    def __init__(
        self,
        name: str,
        store: Store,
        called: str,
        fs: Fs,
        engine: CopyEngine,
        *,
        of_host: bool = False,
        yields: bool = False,
    ) -> None:
        self.name = name
        self.of_host = of_host
        self._yields = yields
        self.store = store
        self._called = called
        self._fs = fs
        self._engine = engine
        self._lock: RunLock | None = None
        self._is_prepared = False
        self._guard = threading.Lock()
        self._unfinished = Unfinished(fs, store.root)
        self._own = secrets.token_hex(4)
        self._copies = 0

    def identity(self) -> str:
        """What tells this directory from one of the same name on another host, or in a container
        with memory of its own; the same for all who see the same files."""
        try:
            booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{booted} {os.stat(self._called).st_dev}"
        except OSError:
            return ""

    @property
    def is_wanted(self) -> bool:
        """Whether a trainer waits for an agent to give the place up."""
        return self._lock is not None and self._lock.is_wanted

    @property
    def was_taken_over(self) -> bool:
        """Whether an agent was at work here when the place was prepared."""
        return self._lock is not None and self._lock.took_over

    def steps(self) -> list[int]:
        return self.store.steps()

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self.store.read(step, name, max_bytes)

    def find(
        self, step: int, name: str, nbytes: int, ranges: Sequence[tuple[int, int]] | None = None
    ) -> str:
        return f"{self.store.path(step)}/{name}"

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self.store.protect(step)

    def prepare(self, token: str | None) -> None:
        with self._guard:
            if self._is_prepared:
                return
            self.store.create()
            if self.store.leads:
                in_memory = self._fs.backend == "sim"
                self._lock = self._lock or RunLock(
                    self._called, in_memory=in_memory, yields=self._yields
                )
                self.store.recover(token)
            self._is_prepared = True

    def take(self, copy: Copy) -> None:
        self._copies += 1
        step, attempt = copy.step, self._named(copy.attempt, copy.part.manifest)
        if self.store.leads:
            self._unfinished.clear(None if self.store.is_mapped else step, attempt)
        self.store.begin(step, attempt)
        for file in copy.part.files:
            self._take_file(copy, file, attempt)
        for record in copy.part.records:
            self.store.seal(step, attempt, *record)

    def _take_file(self, copy: Copy, file: DataFile, attempt: str) -> None:
        left = None
        if not self.store.is_mapped:
            left = self._unfinished.adopt(self.store.partial(copy.step, attempt), file.name)
        with contextlib.ExitStack() as opened:
            there = None
            if left is None:
                target, _ = self.store.data_file(copy.step, file.name, file.bytes, attempt)
            else:
                there = self._fs.open_read(left)
                opened.callback(there.close)
                target = self._fs.open_write(left, file.bytes, reuse=True)
            if not target.mapped:  # those are the store's
                opened.callback(target.close)  # or, after a failure, its error would keep it open
            source = opened.enter_context(copy.opened(file))
            write_copy(self._engine(), file, source, target, copy.before, there)

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        attempt = self._named(attempt, manifest)
        self.store.commit(Copied(step, manifest), attempt)
        with contextlib.suppress(StorageError):  # the next copy clears them
            self._unfinished.clear(None, attempt)

    def drop(self, attempt: str | None) -> None:
        if self._is_prepared:  # else what is there may be another job's
            self._unfinished.clear(None, self._numbered(attempt))

    def retain(self) -> None:
        self.store.retain()

    def abandon(self, step: int, attempt: str | None) -> None:
        """Remove what a save that failed has written here."""
        # What has no name of this job's may be another's, if this one was refused.
        if self._is_prepared or attempt is not None:
            self.store.abandon(step, attempt)

    def rewind(self, step: int) -> list[int]:
        return self.store.rewind(step)

    def _numbered(self, attempt: str | None) -> str:
        """The attempt that is under way: one at a time, for a process that is alone."""
        return attempt or f"{self._own}-{self._copies}"

    def _named(self, attempt: str | None, manifest: bytes) -> str:
        return copy_attempt(self._numbered(attempt), manifest)

    def close(self) -> None:
        self._engine.close()
        if self._lock is not None:
            try:
                self.store.close()
            finally:
                self._lock.release()
