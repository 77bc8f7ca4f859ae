"""The steps of one run directory: the commit protocol, retention, and reuse of retired files.

    RUN/step-000000000100/           committed: complete, durable, never written again
    RUN/step-000000000110.partial/   being written, by one rank
    RUN/step-000000000110.5f3a09c1-7.partial/     by several: the attempt is in its name
    RUN/step-000000000090.retired/   no longer kept; its files may be overwritten
    RUN/step-000000000100.replaced/  counts as step-n while that is missing (publish)
    RUN/step-000000000080.corrupt/   found corrupt by a restore that fell back; left for a person
    RUN/step-...copy-0123456789abcdef.partial/    a copy in the making (target)
    RUN/.spare/                      retired files held back for the next save to overwrite
    RUN/.ready/                      in memory: new files, made before the next save (ready)
    RUN/.shared/                     names of files that several steps hold (pool)

Owns: D1 to D7 and R1 to R3 of docs/durability.md, which has the same numbers (Store).
Invariants: a crash at any moment leaves the step or no step, and every older step untouched. The
newest committed step, and a protected step, are never retired. A name that a restore can find never
leads to bytes that are changing.

Not here: the meaning of the bytes (manifest, header), who waits for whom (pipeline).
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from statehold.errors import (
    CorruptionError,
    InvariantError,
    StateholdError,
    StepNotFoundError,
    StepOrderError,
    StorageError,
)
from statehold.format.entries import About
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from statehold.io import memory_room
from statehold.options.keep import Keep, kept_of
from statehold.steps.directories import (
    REPLACED,
    Attempt,
    attempt_of,
    check_attempt,
    delete,
    each_of,
    is_leftover,
    make_directories,
    standing_step_of,
    unless,
)
from statehold.steps.pool import Pool, linked, sync_all
from statehold.steps.publish import Replaced, entries_of, make_durable, publish, settle
from statehold.steps.ready import READY_NAME, Ready
from statehold.steps.shelf import DirectoryShelf

if TYPE_CHECKING:
    from statehold._core import File, Fs
    from statehold.format.manifest import RecordEntry

    Records: TypeAlias = Sequence[RecordEntry]


SPARE_NAME = ".spare"

# A document grows with values in the state, such as lists of losses.
_MORE_BYTES = 64 << 10


class Rooms:
    """The space that documents of a store need, by their names. Thread-safe.

    A save goes to another level if the first one has no space (save/level_choice). That is decided
    while its data file is opened, because bytes that were copied out of a buffer cannot be written
    twice. So the files of its manifest and record are made then, too, with their storage: that of
    the last such document and a part more. A document that has grown beyond that may still find no
    space, and then the save fails by name.
    """

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


# -- which steps stay ------------------------------------------------------------------------------
# The decision follows from what is on storage, so a restart changes nothing. A manifest is read
# once, and only if a rule asks for metrics or tags. A step whose manifest cannot be read stays.


class Retention:
    """keep: as the user says it. manifest: reads that of a step; raises StateholdError. Not
    synchronised: the caller holds the store's guard."""

    def __init__(self, keep: int | Keep | None, manifest: Callable[[int], bytes]) -> None:
        self.keep = kept_of(keep)
        self.most = None if self.keep is None else self.keep.most  # None: any number can stay
        self.manifest = manifest
        self._known: dict[int, About] = {}

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Those of `steps`, oldest first, that stay."""
        if self.keep is None:
            return set(steps)
        kept = self.keep.of(steps, self._said)
        self._known = {step: about for step, about in self._known.items() if step in kept}
        return kept

    def going(
        self, steps: Callable[[], Sequence[int]], among: Collection[int] | None = None
    ) -> list[int]:
        """Those of the steps here that do not stay, oldest first.

        steps: lists them. among: the only steps that count, as all hosts know them; None: all.
        """
        if self.keep is None:
            return []
        here = steps()
        counting = sorted(here if among is None else among)
        found = sorted(set(counting).intersection(here) - self.kept(counting))
        if found and found[-1] == here[-1]:
            raise InvariantError("retention chose the newest committed step")
        return found

    def forget(self, step: int) -> None:
        """The step is another save by now, or gone."""
        self._known.pop(step, None)

    def _said(self, step: int) -> About | None:
        if step not in self._known:
            with contextlib.suppress(StateholdError):
                raw = self.manifest(step)
                self._known[step] = Manifest.said(raw, f"step {step}")
        return self._known.get(step)


# -- the store -------------------------------------------------------------------------------------


class Newest:
    """The newest committed step, which save() asks for at every call. look: lists the directory.

    A listing takes longer with more steps, and the trainer waits for it. Once the run belongs to
    this job, nobody else commits there, and the answer takes no listing. Thread-safe, with a lock
    of its own: the trainer does not wait for a cleanup by another thread.
    """

    def __init__(self, look: Callable[[], int | None]) -> None:
        self._look = look
        self._guard = threading.Lock()
        self._is_ours = self._is_known = False
        self._step: int | None = None

    def take_over(self, is_ours: bool = True) -> None:
        """Whether only this job changes the newest step from now on."""
        self._is_ours = is_ours

    def get(self) -> int | None:
        """The newest step; None without one."""
        with self._guard:
            if not self._is_known:
                self._step = self._look()
                self._is_known = self._is_ours
            return self._step

    def committed(self, step: int) -> None:
        """Every rank: `step` was committed here."""
        with self._guard:
            if self._is_known:
                self._step = step if self._step is None else max(step, self._step)

    def retired(self, step: int) -> None:
        """`step` no longer counts."""
        if step == self._step:
            self.look_again()

    def look_again(self) -> None:
        """Every rank: steps may have been discarded, so the newest one is no longer known."""
        with self._guard:
            self._is_known = False


class Store(DirectoryShelf):
    """The steps of the run directory `root` on the file system `fs`, which a test may wrap.

    Commit:

        D1 write the data files under step-n.partial/     D2 fdatasync each
        D3 fsync step-n.partial/                          D4 every rank has done D1 to D3
        D5 write and fsync the manifest                   D6 rename step-n.partial to step-n
        D7 fsync the run directory

    The engine does D1 and D2 on files that `data_file` opens. For files that are on storage
    already, `link` does D1 and `sync_links` does D2. `commit` does D3 to D7.

    If several ranks write, each calls `begin`, `data_file` and `seal`, which is D3 on its own host
    and also writes its record. The peers do D4. Then one rank commits: rank 0, or the first rank of
    a host that has its own store. It leads: only this rank makes, hides and deletes directories,
    recovers, commits, abandons, retains and rewinds. An attempt's name is new every time, so files
    that a rank of a dead job still writes are never in a step of this one.

    Retire: R1 rename step-n to step-n.retired. R2 fsync the run directory. Only then R3 may
    overwrite or delete its files.

    Overwriting beats allocating, so one retired step is held back and its files are handed to the
    next save. A file is reused only if the kernel confirms that no process on this host has it open
    or mapped, and that no other name links to it. Otherwise it is deleted, so its readers are not
    disturbed. Each rank takes the file of its own name. The leading rank deletes the rest later.
    It deletes files of another number of ranks at once, because nobody takes them.

    keep: which committed steps stay (options/keep). reuse: overwrite retired files.
    mapped: `root` lies on a memory file system, and data files are written as memory.
    ready: the data file that is made before its save.
    rank, world_size: of the job that saves. `attempt` names its directory of a step in the making;
        without it, only one rank writes. Thread-safe. One job may write; any number may read.
    """

    def __init__(
        self,
        fs: Fs,
        root: str,
        *,
        keep: int | Keep | None = None,
        reuse: bool = True,
        rank: int = 0,
        world_size: int = 1,
        mapped: bool = False,
    ) -> None:
        super().__init__(fs, root)
        self.retention = Retention(keep, self.manifest)
        self._reuse = reuse
        self.leads = rank == 0  # the first of the ranks that see these files may commit and clear
        self._ranks = world_size
        self._own = f"rank-{rank:05d}-"  # names of this rank's files begin so
        self._of_world = f"-of-{world_size:05d}"  # is in the names of files that a rank can take
        self._guard = threading.RLock()
        self._protected = Counter[int]()
        self.intact: int | None = None  # the last step that this job has restored or committed
        self._is_pool_due = False  # what dead jobs have left there is not cleared yet
        self._spares = f"{self.root}/{SPARE_NAME}"
        self._has_spares = False
        self._is_unsettled = False  # a replaced step's name may come back
        self._abandoned: int | None = None  # what could not be removed, of one rank
        self.is_mapped = mapped
        self._is_memory = False  # create() finds out
        self._mapped: dict[str, dict[str, File]] = {}  # by directory, whatever the attempt
        self.known_newest = Newest(self.newest)
        self.ready = Ready(fs, self.root, world_size)
        self.pool = Pool(lambda: self.fs, self.root, rank, world_size, mapped=mapped)
        self._rooms = Rooms()

    # -- reading ---------------------------------------------------------------------------

    def partial(self, step: int, attempt: str | None = None) -> str:
        """The directory of a step in the making."""
        if attempt is None:
            return self.path(step, ".partial")
        check_attempt(attempt)
        return self.path(step, f".{attempt}.partial")

    def confirm(self, step: int, attempt: str) -> bool:
        """Whether `attempt` at a step is committed; if so, repeats D7."""
        try:
            is_ours = self.open(step).attempt == attempt
        except (StepNotFoundError, CorruptionError):
            return False
        if is_ours:
            make_durable(self.fs, self.root)
        return is_ours

    @contextlib.contextmanager
    def protect(self, step: int) -> Iterator[None]:
        """Keep `step` from being retired while it is read."""
        with self._guard:
            self._protected[step] += 1
        try:
            yield
        finally:
            with self._guard:
                self._protected -= Counter((step,))

    def check_there(self) -> None:
        """Raise if the run directory cannot be one, because a file is in its place."""
        if not self.fs.is_dir(self.root):
            with unless(errno.ENOENT):
                self.fs.listdir(self.root)

    # -- opening for writing ---------------------------------------------------------------

    def create(self) -> None:
        """Make the run directory, its parents included, and make their names durable."""
        make_directories(self.fs, self.root)
        self._is_memory = self.fs.backend != "sim" and memory_room.is_memory(self.root)
        self.known_newest.take_over(not self.leads)  # the leading rank does when it has the lock

    def was_removed(self) -> None:
        """Nothing is left of the directory: release everything that this process holds of it."""
        with self._guard:
            self._unmap(*self._mapped)
            self._has_spares = False
            self.ready.drop()
            self.known_newest.look_again()

    def recover(self, token: str | None = None) -> None:
        """Clear the leftovers of a crash. Call once, holding the run's lock.

        token: see job_token. Other ranks of this job may be ahead, so its attempts are left alone.
        While the token is unknown, any attempt may be theirs: begin() clears what is not.
        """
        self._lead("clear a run")
        with self._guard:
            self._settle_names()
            self.known_newest.take_over()
            self.known_newest.look_again()
            self._settle_replaced()
            for hidden in (SPARE_NAME, READY_NAME):
                if self.fs.is_dir(f"{self.root}/{hidden}"):
                    with contextlib.suppress(StorageError):  # no save fails because of leftovers
                        delete(self.fs, f"{self.root}/{hidden}")
            self.pool.clear(token)
            self._is_pool_due = token == ""
            for name in self._leftovers():
                attempt = attempt_of(name)
                if attempt and token in ("", attempt.token):
                    continue
                # Ranks on other hosts may outlive their job. No file that they may still write is
                # reused.
                with contextlib.suppress(StorageError):
                    if attempt:
                        delete(self.fs, f"{self.root}/{name}")
                    else:
                        self._discard(f"{self.root}/{name}")

    def _settle_replaced(self) -> None:
        """Finish, or undo, replacements that a crash or an error has interrupted."""
        for name, is_dir in entries_of(self.fs, self.root):
            if is_dir and name.endswith(REPLACED) and standing_step_of(name) is not None:
                # Until that succeeds a step is read where it is; _retire tries again.
                with contextlib.suppress(StorageError):
                    settle(self.fs, f"{self.root}/{name}".removesuffix(REPLACED))

    def _leftovers(self) -> list[str]:
        entries = entries_of(self.fs, self.root)
        return [name for name, is_dir in entries if is_dir and is_leftover(name)]

    # -- the commit protocol ---------------------------------------------------------------

    def committed(self, step: int) -> None:
        """Every rank: `step` was committed here."""
        self.known_newest.committed(step)
        with self._guard:
            self.intact = step
            self.retention.forget(step)

    def begin(self, step: int, attempt: str | None = None) -> None:
        """D1, before the first byte: an empty directory for the step. Every rank calls this."""
        partial = self.partial(step, attempt)
        with self._guard:
            if attempt is None:
                if self._abandoned is not None:
                    self.abandon(self._abandoned)
                if self.fs.is_dir(partial):
                    self._settle_names()
                    self._discard(partial)
                self.fs.mkdir(partial)
                return
            if self.leads and "." not in attempt:
                self._clear_attempts(attempt)
            with unless(errno.EEXIST):  # another rank made it
                self.fs.mkdir(partial)

    def reserve(self, step: int, attempt: str | None, name: str, guess: Callable[[], int]) -> None:
        """D1, after begin(): space for a document of this rank. guess: its size, if there was no
        document of this name before. Raises StorageError."""
        self._rooms.make(self.fs, self.partial(step, attempt), name, guess)

    def data_file(
        self, step: int, name: str, file_bytes: int, attempt: str | None = None
    ) -> tuple[File, bool]:
        """D1: open a data file of a partial step; the second value says if it was reused."""
        path = f"{self.partial(step, attempt)}/{name}"
        with self._guard:
            kept = self._mapped.get(self._spares, {}).get(name)
            reused = self._take_spare(name, path)
        if self.is_mapped and not reused:
            self.ready.wait()  # it is for this save
            with self._guard:
                kept = self.ready.file(name)
                reused = self._take_ready(name, path)
        if self._is_memory:
            memory_room.weigh(path, file_bytes, reuse=reused, ranks=self._ranks)
        kept = kept if reused else None
        file = self.fs.open_write(path, file_bytes, reused, mapped=self.is_mapped, kept=kept)
        if self.is_mapped and self._ranks == 1:
            with self._guard:
                self._mapped.setdefault(self.partial(step), {})[name] = file
        return file, reused

    def link(self, step: int, name: str, path: str, attempt: str | None = None) -> bool:
        """D1 of a file that is on storage: a second name for it (pool.linked)."""
        return linked(self.fs, path, f"{self.partial(step, attempt)}/{name}")

    def sync_links(self, step: int, names: Sequence[str], attempt: str | None = None) -> None:
        """D2 of files that have got a second name."""
        sync_all(self.fs, [f"{self.partial(step, attempt)}/{name}" for name in names])

    def has_ready(self, name: str) -> bool:
        """Whether a file of this name is mapped, and only waits to be overwritten."""
        with self._guard:
            spares = self._mapped.get(self._spares, {})
            return name in spares or self.ready.file(name) is not None

    def make_ready(self, name: str, file_bytes: int) -> None:
        """After a commit, on every rank: begin to make the file of the next save. Only in memory,
        if no retired file waits, and if there are then at most `keep` files and one."""
        if not (self.is_mapped and self._reuse) or (most := self.retention.most) is None:
            return
        with self._guard, contextlib.suppress(StorageError):  # the save makes its own
            has_spare = self.fs.stat_bytes(f"{self._spares}/{name}") is not None
            if not has_spare and len(self.steps()) <= most:
                self.ready.begin(name, file_bytes)

    def seal(self, step: int, attempt: str | None, name: str, record: bytes) -> None:
        """D3 of one rank, on its own host: its record, and the names of all its files."""
        partial = self.partial(step, attempt)
        self.fs.write_file(f"{partial}/{name}", record)
        self._rooms.written(name, len(record))
        self.fs.sync_dir(partial)

    def commit(
        self, step: int, manifest: bytes, attempt: str | None = None, records: Records = ()
    ) -> None:
        """D3 to D7: publish a step whose data files, and ranks' records, are durable.

        manifest: the content of D5, of any format version. records: those of all ranks, by rank, if
            they should all be in this directory.
        """
        self._lead("commit")
        partial = self.partial(step, attempt)
        with self._guard:
            if records:
                _check_here(self.fs, partial, records)
            replaced = publish(self.fs, partial, self.path(step), manifest)
            self._rooms.written(MANIFEST_NAME, len(manifest))
            self._exchange_mapped(self.partial(step), self.path(step))
            self.committed(step)
            self._is_unsettled |= replaced is Replaced.LEFT
            if replaced is Replaced.HIDDEN:
                with contextlib.suppress(StateholdError):  # a later save or job clears that
                    self._discard(partial, step)
            self._unmap(self.partial(step))

    def abandon(self, step: int, attempt: str | None = None) -> None:
        """Abandon a partial step. A later begin or open clears what cannot be removed now.

        The rank that leads removes the files of all ranks. Any other rank removes its own, because
        it may have made them after that.
        """
        with self._guard, contextlib.suppress(StorageError):
            partial, self._abandoned = self.partial(step, attempt), step
            self._unmap(self.partial(step))
            if self.fs.is_dir(partial):
                if self.leads:
                    self._settle_names()
                own = None if self.leads else lambda name: name.startswith(self._own)
                delete(self.fs, partial, own)
            self._abandoned = None

    def _clear_attempts(self, under_way: str) -> None:
        """Delete attempts that have ended: those of other jobs, and older ones of this job."""
        token, _, number = under_way.partition("-")
        if self._is_pool_due:
            self._is_pool_due = False
            self.pool.clear(token)

        def has_ended(attempt: Attempt | None) -> bool:
            # Other ranks may be ahead, if one of them has ended an attempt by failing.
            ahead = attempt and attempt.token == token and attempt.number >= int(number)
            return attempt is not None and not ahead

        ended = [name for name in self._leftovers() if has_ended(attempt_of(name))]
        # If a rank still writes to a directory, it cannot be deleted now, but next time.
        with contextlib.suppress(StorageError):
            if ended:
                self._settle_names()
            each_of(ended, lambda name: delete(self.fs, f"{self.root}/{name}"))

    def _lead(self, action: str) -> None:
        if not self.leads:
            raise InvariantError(f"only the rank that leads may {action}")

    # -- retention -------------------------------------------------------------------------

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Those of `steps`, oldest first, that stay."""
        with self._guard:
            return self.retention.kept(steps)

    def retain(self, but_for: int | None = None, among: Collection[int] | None = None) -> None:
        """Retire steps that do not stay, but for those being read. among: see Retention.going."""
        self._lead("retire steps")
        with self._guard:
            going = self.retention.going(self.steps, among)
            each_of((n for n in going if n not in self._protected and n != but_for), self._retire)

    def rewind(self, step: int) -> list[int]:
        """Retire every committed step newer than `step`; returns them."""
        self._lead("rewind")
        with self._guard:
            given_up = [newer for newer in self.steps() if newer > step]
            each_of(given_up, self._retire)
            if not given_up:  # perhaps because R2 of an earlier call has failed
                self._settle_names()
            return given_up

    def give_up(self, steps: Iterable[int]) -> None:
        """Retire these steps, except those being read."""
        self._lead("retire steps")
        with self._guard:
            each_of((step for step in steps if step not in self._protected), self._retire)

    def quarantine(self, step: int) -> str:
        """Rename a corrupt step, so that no reader takes it; returns its new path."""
        self._lead("set a step aside")
        with self._guard:
            self._retire(step, ".corrupt")
            return self.path(step, ".corrupt")

    def drop_spare(self) -> None:
        """Delete the files held back for reuse."""
        with self._guard:
            self._unmap(self._spares)
            if self._has_spares:
                delete(self.fs, self._spares)
                self._has_spares = False

    def close(self) -> None:
        """Release everything that this process holds of the store: spare files, and mappings."""
        try:
            self.ready.drop()
            self.pool.close()
            self.drop_spare()
        finally:
            with self._guard:
                self._unmap(*self._mapped)

    # A mapping is worth keeping, because setting one up costs as much as filling it. It moves with
    # its file: from a step in the making to a committed one, to a retired one, and to the save that
    # overwrites it. If a file is deleted, its mapping is closed, too, or its memory would not come
    # back. A store that is not in memory has no mapped files. A store of several ranks keeps none,
    # because no rank knows which file another rank has retired.

    def _exchange_mapped(self, one: str, other: str) -> None:
        """The files of two directories change places."""
        files, others = self._mapped.pop(one, None), self._mapped.pop(other, None)
        self._mapped |= {at: each for at, each in ((one, others), (other, files)) if each}

    def _unmap(self, *directories: str) -> None:
        """The files there are deleted, or not used any more."""
        for directory in directories:
            for file in self._mapped.pop(directory, {}).values():
                file.close()

    def _retire(self, step: int, suffix: str = ".retired") -> None:
        if self._is_unsettled:  # the replaced directory must not count instead of it
            self._settle_names()
            self._is_unsettled = False
        settle(self.fs, self.path(step))
        hidden = self.path(step, suffix)
        if self.fs.is_dir(hidden):
            self._settle_names()
            delete(self.fs, hidden)
        self.fs.rename(self.path(step), hidden)  # R1
        self.known_newest.retired(step)
        self.fs.sync_dir(self.root)  # R2
        self._exchange_mapped(self.path(step), self.partial(step))
        if suffix == ".retired":
            self._discard(hidden, step)  # R3
        else:
            self._unmap(self.partial(step))

    def _settle_names(self) -> None:
        """Make sure that no name of a step may come back to a hidden directory, before a change.

        After a failure, or the death of a process, the sync for that (D7, R2) may be missing.
        """
        self.fs.sync_dir(self.root)

    def _discard(self, directory: str, step: int | None = None) -> None:
        """Hold an invisible directory, of `step`, back for reuse, or delete it."""
        with contextlib.suppress(StorageError):  # a file there may stay, also one of a dead job
            if self._ranks > 1:
                self.drop_spare()  # files that no rank has taken until now
                delete(self.fs, directory, lambda name: self._of_world not in name)
            if self._reuse and not self._has_spares:
                self.fs.rename(directory, self._spares)
                self._has_spares = True
                if step is not None:
                    self._exchange_mapped(self.partial(step), self._spares)
                return
        if step is not None:
            self._unmap(self.partial(step))
        delete(self.fs, directory)

    def _take_spare(self, name: str, path: str) -> bool:
        """Move the spare file `name` to `path` if no other process can see it."""
        with self._guard:
            if self._ranks > 1:
                return self._reuse and self._take(f"{self._spares}/{name}", path)
            if not self._has_spares:
                return False
            spares = self._mapped.get(self._spares, {})
            taken = self._take(f"{self._spares}/{name}", path, spares.get(name))
            if taken:
                spares.pop(name, None)
            with contextlib.suppress(StorageError):  # deleted later if it cannot be deleted now
                self.drop_spare()
            return taken

    def _take_ready(self, name: str, path: str) -> bool:
        """Move the file that was made for this save to `path`, if there is one."""
        file = self.ready.file(name)
        if file is None:
            return False
        taken = self._take(self.ready.path(name), path, file)
        if taken:
            self.ready.taken()
        self.ready.drop()  # if another process has it open: one file, not two
        return taken

    def _take(self, spare_file: str, path: str, kept: File | None = None) -> bool:
        # The leading rank may have deleted it meanwhile. If it is not available, a new one is made.
        with contextlib.suppress(StorageError):
            if self.fs.stat_bytes(spare_file) is None:
                return False
            if self.fs.can_reuse(spare_file, kept):
                self.fs.rename(spare_file, path)
                return True
        return False


def _check_here(fs: Fs, partial: str, records: Records) -> None:
    """Raise StorageError unless the record of every rank is there: hosts may not share the
    directory. A network file system asks its server when a directory is opened to be listed."""
    here = {name for name, _ in fs.listdir(partial)}
    for rank, record in enumerate(records):
        path = f"{partial}/{record.name}"
        if record.name not in here and fs.stat_bytes(path) is None:
            raise StorageError(
                f"cannot commit a step: rank 0 does not see the files of rank {rank}",
                errno=errno.ENOENT,
                path=path,
                hint="all hosts must share this directory: is it mounted on each of them? What "
                "each has for itself is a level statehold.Directory(path=..., per_host=True)",
            )


# -- the order of steps ----------------------------------------------------------------------------
# The advice in an error never discards every step of a run.


def check_newest(
    run: str, step: int, known: Iterable[int | None], steps: Callable[[], Iterable[int]]
) -> None:
    """Refuse to save `step` if a newer one is known in the directory `run`.

    steps: lists the committed steps; called only for the message.
    """
    newest = max((n for n in known if n is not None), default=None)
    if newest is None or step >= newest:
        return
    hint = (
        f"did you forget restore()? restore(state) loads step {newest} and returns its number; "
        f"save greater steps from there. To train from the start again, give the Checkpointer "
        f"another "
        "run directory"
    )
    with contextlib.suppress(StorageError):
        older = max((each for each in steps() if each < step), default=None)
        if older is not None:  # a rewind to anything else could discard every step
            hint += (
                f". To continue from step {older}, call restore(state, step={older}) and "
                f"rewind({older}), which deletes all steps after {older}"
            )
    raise StepOrderError(
        f"step {step} is older than step {newest}, which is saved already",
        facts={"run": run},
        hint=hint,
    )
