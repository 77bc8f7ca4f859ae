"""A level of a run, open: its steps, how they are read, and how a copy of one gets there.

    DirectoryPlace   a store (checkpoint/store/store): memory, a local disk, a parallel file system
    ObjectPlace      an object store (checkpoint/store/objects)

Invariants: a copy is published by the place's own commit and not before all of it is there; whoever
reads never sees half of one. Several ranks copy their parts (`take`), and the one that leads alone
prepares, commits, abandons and retires: rank 0, or the first on each host.
Not here: which steps are copied, and when (promoting); the bytes of a copy (copying).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from statehold.checkpoint.levels.copying import Copied, Copy, DataFile, write_copy
from statehold.checkpoint.store.lock import RunLock
from statehold.checkpoint.store.replacing import read_standing
from statehold.checkpoint.store.unfinished import Unfinished, copy_attempt
from statehold.errors import StorageError
from statehold.io.clients import open_engine

if TYPE_CHECKING:
    from statehold._core import Engine, File, Fs
    from statehold.checkpoint.levels.copying import Source, SourceFile
    from statehold.checkpoint.store.store import Store

logger = logging.getLogger("statehold")

__all__ = ["Below", "CopyEngine", "DirectoryPlace", "Place", "Shared"]

T = TypeVar("T")

# What copies to one level take of the memory, however large the files are.
COPY_BUFFERS = 4


class Place(Protocol):
    """What promotions and restores need of a level."""

    name: str

    @property
    def leads(self) -> bool:
        """Whether this rank commits, abandons and retires here."""

    @property
    def is_apart(self) -> bool:
        """Whether each of several hosts has a part of its own: a commit then takes two rounds."""

    @property
    def takes_steps(self) -> bool:
        """Whether steps can be copied here at all."""

    def share(self, step: int, carriers: Sequence[int], rank: int) -> list[int]:
        """The writers of a step of which `rank` copies the files; `carriers` are the ranks that
        have them at hand, by writer."""

    def landed(self, step: int, carriers: Sequence[int]) -> None:
        """The step is committed here; every rank is told."""

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""

    def holds(self, step: int, name: str) -> bool:
        """Whether a file of a step that is here should be here: else nobody asks for it."""

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        """A document of a step. Raises StorageError with ENOENT, or CorruptionError."""

    def find(
        self, step: int, name: str, nbytes: int, ranges: Sequence[tuple[int, int]] | None = None
    ) -> str:
        """The path of a data file of `nbytes`. One that is far is brought near, as a file of which
        only `ranges` (None: all) need be right; of one that is not, whoever opens it finds out
        whether it is there."""

    def has_file(self, step: int, name: str) -> bool:
        """Whether a file that find() gave the path of is there now: the step may have been at
        another path for a moment. False where steps have one path only."""

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

    def is_owed(self, newest: int | None) -> bool:
        """Whether a copy of a step above `newest` was begun, and not finished."""

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
            self._engine = open_engine(self._fs, staging, self._buffer_bytes, 1)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class Below:
    """A `Source` of the files of steps, by their paths below a directory. A step that is being
    replaced is read where it is (checkpoint/store/replacing)."""

    def __init__(self, fs: Fs, root: str) -> None:
        self._fs = fs
        self._root = root

    def read_file(self, path: str, max_bytes: int) -> bytes:
        return self._standing(path, lambda found: self._fs.read_file(found, max_bytes))

    def open_read(self, path: str) -> SourceFile:
        return self._standing(path, self._fs.open_read)

    def open_view(self, path: str, nbytes: int) -> File:
        return self._standing(path, lambda found: self._fs.open_view(found, nbytes))

    def _standing(self, path: str, act: Callable[[str], T]) -> T:
        step, _, name = f"{self._root}/{path}".rpartition("/")
        return read_standing(self._fs, step, lambda directory: act(f"{directory}/{name}"))


class Shared:
    """What holds for a level that all ranks see."""

    @property
    def is_apart(self) -> bool:
        return False

    @property
    def takes_steps(self) -> bool:
        return True

    def share(self, step: int, carriers: Sequence[int], rank: int) -> list[int]:
        return [writer for writer, carrier in enumerate(carriers) if carrier == rank]

    def landed(self, step: int, carriers: Sequence[int]) -> None: ...

    def holds(self, step: int, name: str) -> bool:
        return True

    def is_owed(self, newest: int | None) -> bool:
        return False


class DirectoryPlace(Shared):
    """A store on a file system; `called` is the directory as the user named it, yields: an agent
    opens it (store/lock); takes_copies: False for the first level, where steps are only saved.
    Thread-safe: it is prepared by whoever comes first, the trainer or a
    promotion."""

    def __init__(
        self,
        name: str,
        store: Store,
        called: str,
        fs: Fs,
        engine: CopyEngine,
        *,
        yields: bool = False,
        takes_copies: bool = True,
    ) -> None:
        self.name = name
        self._takes_copies = takes_copies
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

    @property
    def leads(self) -> bool:
        return self.store.leads

    def lead(self) -> None:
        """This rank does here what rank 0 does elsewhere; prepare() has more to do then."""
        with self._guard:
            self.store.lead()
            self._is_prepared = False

    @property
    def is_prepared(self) -> bool:
        return self._is_prepared

    def identity(self) -> str:
        """What tells this directory from one of the same name on another host, or in a container
        with files of its own; the same for all who see the same files."""
        if self._fs.backend == "sim":
            return f"simulated {id(self._fs)}"
        try:
            booted = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
            above = Path(self._called)
            while not above.is_dir() and above != above.parent:
                above = above.parent
            found, below = os.stat(above), os.path.relpath(self._called, above)
        except OSError:  # who cannot look is alone, and will say why when it writes
            return f"unknown {secrets.token_hex(8)}"
        return f"{booted} {found.st_dev} {found.st_ino} {below}"

    def check_order(self, step: int, newest: int | None, *, may_be_away: bool = False) -> None:
        """Refuse a save that would not become the newest step; `newest` is known from elsewhere."""
        self.store.check_order(step, newest, may_be_away=may_be_away)

    def source(self, step: int) -> Source:
        """Where a step is copied from; paths are names of its files."""
        return Below(self._fs, self.store.path(step))

    def carriers(self, step: int, saved: int, ranks: int) -> list[int]:
        """By writer, of `saved` that there were, the rank of `ranks` that copies its files from
        here: itself, if so many have saved."""
        return [writer % ranks for writer in range(saved)]

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
        return f"{self.store.where(step)}/{name}"

    def has_file(self, step: int, name: str) -> bool:
        return self.store.has_file(step, name)

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self.store.protect(step)

    def prepare(self, token: str | None) -> None:
        with self._guard:
            if self._is_prepared and not self._was_removed():
                return
            self.store.create()
            if self.store.leads:
                disk = id(self._fs) if self._fs.backend == "sim" else 0
                self._lock = self._lock or RunLock(self._called, disk=disk, yields=self._yields)
                self.store.recover(token)
                if not self._takes_copies:  # a run that had other levels before
                    self._unfinished.clear_all()
            self._is_prepared = True

    def _was_removed(self) -> bool:
        """Whether somebody has removed the directory since it was prepared. What is there by now is
        another one: its lock has to be taken, and this job's may be another job's."""
        is_there = self._fs.is_dir(self.store.root)
        if is_there and not (self._lock is not None and self._lock.is_lost):
            return False
        logger.warning("%s, or its lock, was removed; creating and locking it again", self._called)
        self._is_prepared = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.store.was_removed()
        return True

    def take(self, copy: Copy) -> None:
        self._copies += 1
        step, attempt = copy.step, self._named(copy.attempt, copy.part.manifest)
        if self.store.leads:
            but_for = None if self.store.is_mapped else step
            self._unfinished.clear(but_for, attempt, and_own=False)
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

    def is_owed(self, newest: int | None) -> bool:
        with contextlib.suppress(StorageError):
            return any(
                step > (-1 if newest is None else newest) for step in self._unfinished.steps()
            )
        return False

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

    def quarantine(self, step: int) -> str:
        """Set a step aside; returns where it is now."""
        return self.store.quarantine(step)

    def forget(self, steps: Collection[int]) -> None:
        """These steps were given up; every rank is told."""

    def _numbered(self, attempt: str | None) -> str:
        """The attempt that is under way: one at a time, for a process that is alone."""
        return attempt or f"{self._own}-{self._copies}"

    def _named(self, attempt: str | None, manifest: bytes) -> str:
        return copy_attempt(self._numbered(attempt), manifest)

    def close(self) -> None:
        self._engine.close()
        try:
            self.store.close()
        finally:
            if self._lock is not None:
                self._lock.release()
