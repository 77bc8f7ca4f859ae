"""A level of a run, open: a shelf that copies of steps are put on.

    Target           a shelf (shelf), and what writes there
    DirectoryPlace   a store (store): memory, a local disk, a parallel file system
    ObjectPlace      an object store (levels/object_place)

Invariants: the target's own commit publishes a copy, and not before all of it is there. So no
reader sees half of one. Several ranks copy their parts (`take`). Only the leading rank prepares,
commits, abandons and retires: rank 0, or the first on each host.

Not here: which steps are copied, and when (promoting); the bytes of a copy (copying).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from statehold._core import Engine, Fs
from statehold.errors import NoSpaceError, StateholdError, StorageError
from statehold.format.manifest import Commit, Manifest
from statehold.io.clients import open_engine
from statehold.io.memory_room import free_bytes
from statehold.process.warn import logger
from statehold.ranks.peers import Peers, job_token
from statehold.steps.copying import Already, Copy, DataFile, blocks, write_copy
from statehold.steps.directories import ATTEMPT, COPY_DIGITS, delete, unless
from statehold.steps.lock import RunLock
from statehold.steps.owners import OwnedSteps
from statehold.steps.publish import entries_of
from statehold.steps.shelf import Shelf, Through
from statehold.steps.store import Store, check_newest
from statehold.steps.whole import is_whole
from statehold.units import format_bytes

# -- the places ------------------------------------------------------------------------------------


# By writer, of so many that have saved a step, the rank that copies its files.
Carriers = Callable[[int], list[int]]
# From the manifest of a step, and its carriers: the writers whose files this rank copies.
Share = Callable[[bytes, Sequence[int]], list[int]]

# The memory for copies to one level, however large the files are.
COPY_BUFFERS = 4


class Target(Through):
    """A level. shelf: where its steps are read, unless a kind of level says otherwise.

    owned: whose steps these are; None if nobody else can have any here.
    """

    def __init__(self, name: str, shelf: Shelf, owned: OwnedSteps | None) -> None:
        super().__init__(name, shelf)
        self.owned = owned

    # -- reading ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        found = self._shelf.steps()
        return [] if found and self.owned is not None and self.owned.is_anothers else found

    def shelves(self) -> Sequence[Shelf]:
        """The shelves from which a restore reads, the nearest first."""
        return [self]

    def is_whole(self, step: int) -> bool:
        """Whether all files of one of its steps are here; True where that is not known without a
        transfer, or from this host."""
        return True

    # -- writing ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def leads(self) -> bool:
        """Whether this rank commits, abandons and retires here."""

    @property
    def takes_steps(self) -> bool:
        """Whether steps can be copied here at all."""
        return self.owned is None or not self.owned.is_refused

    @abstractmethod
    def prepare(self, peers: Peers | None) -> None:
        """Before the first change: create it, take it for this run, and clear leftovers of a crash.

        May be called again, without effect. peers: the ranks of this job, which may be ahead.
        """

    @abstractmethod
    def take(self, copy: Copy) -> None:
        """Copy a rank's part of a step; durable on return.

        Files that an earlier copy of the same manifest has left are verified, and not copied again.
        """

    @abstractmethod
    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        """Publish a step; the parts of all ranks are there."""

    @abstractmethod
    def retain(self) -> str:
        """Retire the steps that are no longer kept.

        Returns a warning if any number of steps stay, and few more have room; empty without one.
        """

    @abstractmethod
    def drop(self, attempt: str | None) -> None:
        """Remove unpublished copies that are not to be continued."""

    @abstractmethod
    def rewind(self, step: int) -> list[int]:
        """Discard every step newer than `step`; returns them."""

    @abstractmethod
    def quarantine(self, step: int) -> str:
        """Set a damaged step aside; returns its new place. Nothing of it is lost."""

    def is_owed(self, newest: int | None) -> bool:
        """Whether a copy of a step above `newest` was begun, and not finished."""
        return False

    def stop(self) -> None:
        """Wait for nothing that may never answer from now on."""

    @abstractmethod
    def close(self) -> None:
        """Release what prepare() took."""

    # -- over several hosts ----------------------------------------------------------------

    is_of_hosts = False  # whether each host has such a level for itself

    @property
    def may_be_apart(self) -> bool:
        """Whether several hosts have a part of it, as far as this rank knows."""
        return False

    def beside(self, peers: Peers | None) -> Sequence[Target]:
        """What else gets the steps of this level: copies that its hosts keep for each other."""
        return []

    @property
    def is_apart(self) -> bool:
        """Whether each of several hosts has a part of its own; a commit then takes two rounds."""
        return False

    def share(self, step: int, rank: int) -> Share:
        """Before a copy of a step begins: what `rank` copies of it. It depends on what is known
        now, the same on all ranks, and not on what is learned during the copy."""
        return lambda _, carriers: [
            writer for writer, carrier in enumerate(carriers) if carrier == rank
        ]

    def landed(self, step: int, save: str, carriers: Sequence[int]) -> None:
        """The step is committed here; every rank calls this. Raises StorageError if it is no longer
        the save of the step that counts: `save` is the sha256 of its manifest."""

    def missed_end(self, step: int, manifest: bytes) -> None:
        """This rank has missed the end of a copy: whether it is complete is unknown."""

    def learn(self, landed: Collection[str]) -> None:
        """Some rank knows that these copies are complete: sha256 of their manifests."""


def last_saved_s(place: Shelf, now_s: float) -> float:
    """When the newest step at a level was saved, on the clock that shows `now_s`.

    Infinitely long ago, so that the next step is due, if there is none, if its time cannot be read,
    or if it lies in the future because the clocks of two hosts differ.
    """
    try:
        newest = max(place.steps(), default=None)
        if newest is None:
            return -math.inf
        raw = place.manifest(newest)
        age_s = time.time() - Manifest.saved_at(raw, f"step {newest} at {place.name}")
    except (StateholdError, ValueError):  # the restore or copy that reads it reports it
        return -math.inf
    return now_s - age_s if age_s >= 0 else -math.inf


class CopyEngine:
    """The engine that copies to one level, opened when there is something to copy.

    It has its own buffers, so a copy never takes buffers that a save, or a faster level, waits for.
    Thread-safe: a save may copy a file into the level while a step is copied there.
    """

    def __init__(self, fs: Fs, buffer_bytes: int) -> None:
        self._fs = fs
        self._buffer_bytes = buffer_bytes
        self._engine: Engine | None = None
        self._guard = threading.Lock()

    def __call__(self) -> Engine:
        with self._guard:
            if self._engine is None:
                staging = COPY_BUFFERS * self._buffer_bytes
                self._engine = open_engine(self._fs, staging, self._buffer_bytes, 1)
            return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@dataclass(frozen=True, slots=True)
class StoreSite:
    """Where the store of a level lies, and how steps get there.

    called: the directory as the user named it. yields: an agent opens it (lock).
    takes_copies: False for the first level, where steps are only saved.
    make_home: makes the directory, where it is not for everybody to look into.
    owned: whose steps these are; None for the run directory itself.
    only: the manifest of the one step that a command brings here, for a person. What others have
        left here stays then, and no bytes become part of that step unread.
    """

    name: str
    store: Store
    called: str
    engine: CopyEngine
    yields: bool
    takes_copies: bool = True
    make_home: Callable[[str], object] = lambda root: None
    owned: OwnedSteps | None = None
    only: bytes | None = None


class DirectoryPlace(Target):
    """A store on a file system.

    Thread-safe: the trainer or a promotion prepares it, whichever comes first.
    """

    def __init__(self, site: StoreSite) -> None:
        super().__init__(site.name, site.store, site.owned)
        self.store = site.store
        self.store.name = site.name
        self._site = site
        self._fs = site.store.fs
        self._lock: RunLock | None = None
        self.is_prepared = self.may_lack_room = False  # for steps that may go
        self._guard = threading.Lock()
        self._unfinished = Unfinished(self._fs, site.store.root, site.only)
        self._filling = Filling(site.store)
        self._own = secrets.token_hex(4)
        self._copies = 0

    @property
    def engine(self) -> Engine:
        """The engine of copies to this place, whose buffers no save takes."""
        return self._site.engine()

    @property
    def leads(self) -> bool:
        return self.store.leads

    def lead(self) -> None:
        """This rank does here the work of rank 0; prepare() has more to do then."""
        with self._guard:
            self.store.leads = True
            self.is_prepared = False

    def check_order(
        self, step: int, known: Iterable[int | None], *, may_be_unreachable: bool = False
    ) -> None:
        """Refuse a save that would not become the newest step. known: steps from elsewhere."""
        try:
            here = self.store.known_newest.get()
        except StorageError:
            if not may_be_unreachable:
                raise
            here = None
        check_newest(self.store.root, step, (here, *known), self.store.steps)

    def shelves(self) -> Sequence[Shelf]:
        return [self if self.owned is not None else self.store]

    def source(self, step: int) -> Shelf:
        """Where a copy of a step reads it, from the begin of the copy to its end."""
        return self.store

    def carriers(self, step: int, ranks: int) -> Carriers:
        """Before copies of a step begin: which of `ranks` copy its files from here.

        Each writer copies its own files, if so many ranks have saved.
        """
        return lambda saved: [writer % ranks for writer in range(saved)]

    @property
    def is_wanted(self) -> bool:
        """Whether a trainer waits for an agent to give the place up."""
        return self._lock is not None and self._lock.is_wanted

    @property
    def was_taken_over(self) -> bool:
        """Whether an agent was at work here when the place was prepared."""
        return self._lock is not None and self._lock.took_over

    def is_whole(self, step: int) -> bool:
        return self.is_apart or is_whole(self.store, step)

    def prepare(self, peers: Peers | None) -> None:
        with self._guard:
            if self.is_prepared and not self._was_removed():
                return
            if self.owned is not None and self.store.leads:
                self.owned.check(is_empty=not self.store.steps())  # before another job's lock
            self._site.make_home(self.store.root)
            self.store.create()
            if self.store.leads:
                site, disk = self._site, id(self._fs) if self._fs.backend == "sim" else 0
                self._lock = self._lock or RunLock(
                    site.called, disk=disk, yields=site.yields, passes=site.only is not None
                )
                if self.owned is not None:
                    self.owned.claim(is_empty=not self.store.steps())
                if site.only is None:
                    with job_token(peers) as token:
                        self.store.recover(token)
                self.may_lack_room = True  # a job may have died before R1, or have kept more
                if not self._site.takes_copies:  # a run that had other levels before
                    self._unfinished.clear()
            self.is_prepared = True

    def _was_removed(self) -> bool:
        """Whether somebody has removed the directory since it was prepared.

        A directory there now is another one. Its lock has to be taken, and may be another job's.
        """
        is_there = self._fs.is_dir(self.store.root)
        if is_there and not (self._lock is not None and self._lock.file.is_lost):
            return False
        logger.warning(
            "%s, or its lock, was removed; creating and locking it again", self._site.called
        )
        self.is_prepared = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.store.was_removed()
        if self.owned is not None:
            self.owned.was_removed()
        return True

    def make_room(self) -> None:
        """Before the first save or copy of a job writes here, and after a retention that failed:
        retire what does not stay. Otherwise a full disk takes no step that retires others.

        Nobody knows yet that a newer step is whole, so the one that this job has restored stays,
        too, or the newest one with all its files that this version reads. prepare() would be too
        early: restore() calls it to set a damaged step aside. Several hosts learn only from a
        commit what is whole on all.
        """
        if self.is_apart or self.may_be_apart:
            return
        with contextlib.suppress(StateholdError):  # the retention after the commit says why
            steps, intact = self.steps(), self.store.intact
            if intact is None and len(self.store.kept(steps)) < len(steps):
                whole = (n for n in reversed(steps) if is_whole(self.store, n, newer=False))
                intact = next(whole, steps[-1])
            self.store.retain(intact, steps)
            self.may_lack_room = False

    def take(self, copy: Copy) -> None:
        self._copies += 1
        step, attempt = copy.step, self._named(copy.attempt, copy.part.manifest)
        if self.may_lack_room:
            self.make_room()
        if self.store.leads:
            but_for = -1 if self.store.is_mapped else step
            self._unfinished.clear(but_for, attempt, and_own=False)
        self.store.begin(step, attempt)
        takes_names = copy.near is not None or self._site.only is None
        already = Already(self.store, step, copy.part.files if takes_names else ())
        with already.known(self.source):
            for file in copy.part.files:
                if self._link(copy, file, attempt, already):
                    copy.watch.linked(file.bytes)
                else:
                    self._take_file(copy, file, attempt)
        for record in copy.part.records:
            self.store.seal(step, attempt, *record)

    def _link(self, copy: Copy, file: DataFile, attempt: str, already: Already) -> bool:
        """Give a file that is here already, or at the source if that is wanted, a second name."""
        if already.link(file, attempt) and self._is_sound(copy, file, attempt):
            return True
        if copy.near is None:
            return False
        path = f"{copy.near}/{file.name}"
        is_linked = self.store.link(copy.step, file.name, path, attempt)
        return is_linked and self._is_sound(copy, file, attempt)

    def _is_sound(self, copy: Copy, file: DataFile, attempt: str) -> bool:
        """Whether a file with a second name may stand in the step. A damaged one loses the name."""
        if self._site.only is None:  # reading it would take the time of a copy
            return True
        path = f"{self.store.partial(copy.step, attempt)}/{file.name}"
        try:
            with contextlib.closing(self._fs.open_read(path)) as there:
                for block in blocks(file, there):
                    copy.before(len(block))
        except StateholdError:  # a copy from the source is sound, or finds the damage there
            self._fs.unlink(path)
            return False
        return True

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
                # otherwise, after a failure, its error would keep it open
                opened.callback(target.close)
            source = opened.enter_context(copy.opened(file))
            write_copy(self.engine, file, source, target, copy.before, there)

    def take_in(
        self, step: int, attempt: str | None, files: Sequence[tuple[DataFile, str]], durable: int
    ) -> list[str]:
        """D1 and D2 of files of a save, each with its path: second names for them.

        durable: how many of them, the first ones, have had D2 already. Returns the paths of those
        that the file system gives no name. They are copied, and verified on the way.
        """
        copied, names = [], list[str]()
        for index, (file, path) in enumerate(files):
            if self.store.link(step, file.name, path, attempt):
                if index >= durable:
                    names.append(file.name)
            else:
                self._copy_in(step, attempt, file, path)
                copied.append(path)
        self.store.sync_links(step, names, attempt)
        return copied

    def _copy_in(self, step: int, attempt: str | None, file: DataFile, path: str) -> None:
        target, _ = self.store.data_file(step, file.name, file.bytes, attempt)
        with contextlib.ExitStack() as opened:
            if not target.mapped:
                opened.callback(target.close)
            source = self._fs.open_read(path)
            opened.callback(source.close)
            write_copy(self.engine, file, source, target, lambda _: None)

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        attempt = self._named(attempt, manifest)
        listed = None if self.is_apart else Manifest.listed(manifest, self.store.path(step), step)
        records = listed.records if isinstance(listed, Commit) else ()
        self.store.commit(step, manifest, attempt, records)
        with contextlib.suppress(StorageError):  # the next copy clears them
            self._unfinished.clear(attempt=attempt)

    def is_owed(self, newest: int | None) -> bool:
        with contextlib.suppress(StorageError):
            return any(
                step > (-1 if newest is None else newest) for step in self._unfinished.steps()
            )
        return False

    def drop(self, attempt: str | None) -> None:
        if self.is_prepared:  # otherwise it may be another job's
            self._unfinished.clear(attempt=self._numbered(attempt))

    def retain(self) -> str:
        self.may_lack_room = True
        self.retire()
        self.may_lack_room = False
        return "" if self.store.retention.most is not None else self._filling.warning()

    def retire(self) -> None:
        """Retire the steps that are no longer kept."""
        self.store.retain()

    def abandon(self, step: int, attempt: str | None) -> None:
        """Remove the files of a failed save here."""
        # Files without this job's name may be another job's, if this one was refused.
        if self.is_prepared or attempt is not None:
            self.store.abandon(step, attempt)

    def rewind(self, step: int) -> list[int]:
        return self.store.rewind(step)

    def quarantine(self, step: int) -> str:
        return self.store.quarantine(step)

    def forget(self, steps: Collection[int]) -> None:
        """These steps were discarded; every rank calls this."""

    def _numbered(self, attempt: str | None) -> str:
        """The attempt under way: only one at a time, for a process that is alone."""
        return attempt or f"{self._own}-{self._copies}"

    def _named(self, attempt: str | None, manifest: bytes) -> str:
        return copy_attempt(self._numbered(attempt), manifest)

    def close(self) -> None:
        self._site.engine.close()
        try:
            self.store.close()
        finally:
            if self._lock is not None:
                self._lock.release()


@contextlib.contextmanager
def opened(
    store: Store, called: str, name: str, buffer_bytes: int, only: bytes
) -> Iterator[DirectoryPlace]:
    """A directory that the step with the manifest `only` is put into, locked. After an error it
    keeps what the next copy can use, unless the storage has no room."""
    engine = CopyEngine(store.fs, buffer_bytes)
    place = DirectoryPlace(StoreSite(name, store, called, engine, yields=False, only=only))
    try:
        place.prepare(None)
        yield place
    except NoSpaceError:  # others need what there was
        place.drop(None)
        raise
    finally:
        place.close()


# -- the warning before a storage is full ----------------------------------------------------------
# No step is deleted that a user has not asked to delete, so by default all stay. Then the storage
# must not be full before anybody has heard of it: a warning comes when few more steps have room.
#
# It costs one question to the file system for each commit. The files of a step are looked at when
# the first step is there, and again before a warning. A warning comes again only if there was room
# in between. A file system that cannot be asked gives no warning.


# A warning comes if fewer steps than this have room.
STEPS_LEFT = 10


class Filling:
    """Looks at the storage of a store in which any number of steps can stay, on the rank that
    leads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._step_bytes = 0
        self._has_warned = False

    def warning(self) -> str:
        """The text of a warning, after a step was committed; empty if there is none."""
        store = self._store
        if store.fs.backend == "sim":
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


# -- copies that are not finished ------------------------------------------------------------------
# Their names, and the files of earlier copies to continue from:
#
#     RUN/step-000000000100.5f3a09c1-7.copy-0123456789abcdef.partial/
#
# The last part is the beginning of the sha256 of the copied manifest, which says what the files
# will become. A step that was saved again has another manifest, so no file of the earlier save is
# taken for it. The attempt before it is new every time, as for a save. A copy never continues in a
# directory that a process of an earlier job may still know. It moves the files out, and only files
# that no process has open, as the kernel says (as for spare files, store).
#
# The caller must verify the files that it takes over; a name proves nothing. Only copies look at
# these directories; readers and saves ignore them.

_NAME = re.compile(
    rf"step-(?P<step>[0-9]{{12}})\.{ATTEMPT}\.copy-(?P<digest>[0-9a-f]{{{COPY_DIGITS}}})\.partial"
)


def copy_attempt(attempt: str, manifest: bytes) -> str:
    """The attempt at a copy of the step with this manifest."""
    return f"{attempt}.copy-{hashlib.sha256(manifest).hexdigest()[:COPY_DIGITS]}"


class Unfinished:
    """The copies in the making below `root`; with `only`, those of the step with this manifest."""

    def __init__(self, fs: Fs, root: str, only: bytes | None = None) -> None:
        self._fs = fs
        self._root = root
        self._only = "" if only is None else copy_attempt("", only)

    def steps(self) -> set[int]:
        """The steps with an unfinished copy."""
        return {int(match["step"]) for match in self._found()}

    def adopt(self, partial: str, name: str) -> str | None:
        """The file `name` of an earlier copy, moved into the directory `partial`.

        None if there is no such file that no other process has.
        """
        target = _NAME.fullmatch(partial.rpartition("/")[2])
        path = f"{partial}/{name}"
        for match in self._found():
            left = f"{self._root}/{match[0]}/{name}"
            if target is None or match[0] == target[0] or _copied(match) != _copied(target):
                continue
            if self._is_free(left):
                with unless(errno.ENOENT):  # another rank took it
                    self._fs.rename(left, path)
                    return path
        return None

    def clear(self, but_for: int = -1, attempt: str = "-0", *, and_own: bool = True) -> None:
        """The leading rank, which holds the lock: delete the unfinished copies of all steps
        `but_for` one.

        Newer copies of the job of `attempt` stay, and without `and_own` this one, too: other ranks
        may be ahead. By default all go, because no job has an empty token. Directories that cannot
        be deleted now are deleted by the next call.
        """
        token, number = attempt.partition(".")[0].split("-")
        for match in list(self._found()):
            is_ahead = match["token"] == token and int(match["number"]) >= int(number) + and_own
            if int(match["step"]) != but_for and not is_ahead:
                with contextlib.suppress(StorageError):  # no save fails because of leftovers
                    self._fs.sync_dir(self._root)
                    delete(self._fs, f"{self._root}/{match[0]}")

    def _is_free(self, path: str) -> bool:
        return self._fs.stat_bytes(path) is not None and self._fs.can_reuse(path)

    def _found(self) -> Iterator[re.Match[str]]:
        for name, is_dir in entries_of(self._fs, self._root):
            match = _NAME.fullmatch(name) if is_dir else None
            if match and self._only in name:
                yield match


def _copied(match: re.Match[str]) -> tuple[str, str]:
    """The step and manifest that a directory is a copy of."""
    return match["step"], match["digest"]
