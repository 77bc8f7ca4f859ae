"""Subgroups on paths: one call writes or reads a subgroup, and returns when it is done.

    FolderClaim      each optimizer has a folder of its own on a path
    StateFiles       its files: each holds one generation of one subgroup
    Turn             the optimizers of a node move bytes on a path one at a time, in each direction
    SubgroupStore    all paths of an optimizer

Invariants: every byte that is written is hashed, and every byte that is read is verified before the
call returns. The files are working memory. Nothing reads them after their process has ended: a
restart begins from a committed step, and open() removes what a dead job has left.

Not here: when which subgroup moves (pipeline), which path it goes to (planners/placement).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import re
import socket
import threading
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from statehold import _core
from statehold._core import File, Fs
from statehold.errors import (
    ChecksumError,
    NoSpaceError,
    StateholdError,
    StorageError,
    UsageError,
    some,
    storing,
)
from statehold.io.clients import Client, open_engine, open_past_cache
from statehold.io.memory_room import open_file
from statehold.layout.plan import BLOCK_BYTES
from statehold.layout.stored import SUM_BYTES
from statehold.observe.background_log import log_once
from statehold.offload.head import FileForm, Head, Piece
from statehold.offload.stats import Kind, Meter, Timeline
from statehold.offload.subgroups import PAGE_BYTES, Subgroup
from statehold.offload.tiers import Path
from statehold.options.paths import absolute
from statehold.planners.placement import Moved
from statehold.process.file_locks import LockFile
from statehold.process.ownership import is_own
from statehold.process.warn import logger
from statehold.units import MiB

# -- the store -------------------------------------------------------------------------------------
# Transfers go straight between a file and the caller's memory, but for the last bytes of a part,
# which fill no page. A limit of a path holds for its reads and writes together. The seconds of a
# transfer include the wait for its turn, so other optimizers on a path make it slower for the
# placement, too.


# Of requests under way on each path. With more, a read that ends an exchange waits for all that was
# asked for before. A disk moves requests of this size at full speed.
QUEUE_DEPTH = 12
TRANSFER_BYTES = 4 * MiB
STAGING_BYTES = 16 * MiB
COPY_THREADS_MAX = 4
PARTS_NAMED = 4

_zeros = torch.zeros(PAGE_BYTES, dtype=torch.uint8, device="cpu")


@dataclass(slots=True)
class Stored:
    """A generation of a subgroup: the path's number, the file, the checksums of its parts.

    header: that of the file, once it has one.
    """

    path: int
    file: str
    sums: bytes
    header: bytes = b""


class PathMeters:
    """What one path has moved."""

    def __init__(self) -> None:
        self.read, self.written, self.both = Meter(), Meter(), Meter()


class SubgroupStore:
    """All paths of an optimizer. forms: of the files of all subgroups. names: of all parameters.

    fs: a file system from the caller, which stays open.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        forms: Sequence[FileForm],
        names: Sequence[str],
        fs: Fs | None = None,
    ) -> None:
        self.forms, self._names = forms, names
        self.heads: Mapping[int, Head] = {}  # of the newest save, by the index of the subgroup
        self._head_guard = threading.Lock()
        with contextlib.ExitStack() as owned:
            if fs is None:
                fs = _core.open_fs("auto", QUEUE_DEPTH * max(1, len(paths)))
                owned.callback(fs.close)
            self._fs = fs
            self._engine = open_engine(
                fs, STAGING_BYTES, BLOCK_BYTES, min(COPY_THREADS_MAX, os.cpu_count() or 1)
            )
            owned.callback(self._engine.close)
            self.files: list[StateFiles] = []
            self._turns: list[PathTurns] = []
            for number, path in enumerate(paths):
                is_real, directory = fs.backend != "sim", path.directory
                if is_real:  # the program may change its working directory
                    directory = absolute(directory, "a path of an optimizer")
                self.files.append(StateFiles(fs, directory))
                owned.callback(self.files[-1].close)
                self._turns.append(PathTurns(directory if path.exclusive and is_real else None))
                owned.callback(self._turns[-1].close)
                self._engine.set_limit(number, None, path.rate or 0)
            self._owned = owned.pop_all()
        self.meters = [PathMeters() for _ in paths]
        self.all_transfers = Meter()
        self.timeline = Timeline()

    def write(self, subgroup: Subgroup, memory: torch.Tensor, path: int) -> Stored:
        """Write the next generation of a subgroup to a path, with the header of the newest save.

        The next save most likely wants the same header. Then it has no header to write, one by one.
        """
        form, head = self.forms[subgroup.index], self.heads.get(subgroup.index)
        name, file = self.files[path].take(form.nbytes)
        try:
            with self._moving(file, "write", subgroup, path):
                ranges = [(piece, memory.data_ptr() - form.data_begin) for piece in form.parts]
                if not file.direct:  # else the last page of each part is filled with zeros
                    ranges += [(piece, _zeros.data_ptr() - piece[0]) for piece in form.padding]
                ranges += [] if head is None else head.ranges
                sums = self._transfer(file, ranges, memory, path, None)
        except BaseException:
            self.files[path].give_back(name)
            raise
        header = head.encoded if head else b""
        return Stored(path, name, sums[: SUM_BYTES * len(form.parts)], header)

    def write_head(self, stored: Stored, head: Head) -> None:
        """Write the header of a file that is held, unless it is there."""
        with self._head_guard:  # a file that has its header may have a second name
            if stored.header == head.encoded:
                return
            opened = self.files[stored.path].open_held(stored.file, head.form.nbytes)
            with contextlib.closing(opened) as file:
                self._transfer(file, head.ranges, head.memory, stored.path, None)
            stored.header = head.encoded

    def read(self, subgroup: Subgroup, stored: Stored, memory: torch.Tensor) -> None:
        """Read a subgroup. Raises ChecksumError, with its parameters, for a damaged one."""
        self.files[stored.path].check()
        form = self.forms[subgroup.index]
        file = open_past_cache(self._fs, stored.file)
        try:
            with self._moving(file, "read", subgroup, stored.path):
                at = memory.data_ptr() - form.data_begin
                ranges = [(piece, at) for piece in form.parts]
                self._transfer(file, ranges, memory, stored.path, stored.sums)
        except _core.Mismatch as found:
            raise self._damaged(form, found) from None

    def moved(self, path: int) -> Moved:
        """What a path has moved so far."""
        meters = self.meters[path]
        return Moved(meters.read.nbytes, meters.written.nbytes, meters.both.busy_s)

    def close(self) -> None:
        """Remove all state files, and release everything. No transfer is under way."""
        self._owned.close()

    @contextlib.contextmanager
    def _moving(self, file: File, kind: Kind, subgroup: Subgroup, path: int) -> Iterator[None]:
        """Measure the transfer of a subgroup, when it has its turn, and close the file then."""
        meters, turns = self.meters[path], self._turns[path]
        is_write = kind == "write"
        with contextlib.ExitStack() as measured:
            measured.callback(file.close)
            for meter in (meters.written if is_write else meters.read, meters.both,
                          self.all_transfers):  # fmt: skip
                measured.enter_context(meter.moving(subgroup.nbytes))
            measured.enter_context((turns.write if is_write else turns.read).taken())
            directory = self.files[path].directory
            measured.enter_context(self.timeline.during(kind, subgroup.index, directory))
            yield

    def _transfer(
        self,
        file: File,
        ranges: Sequence[tuple[Piece, int]],
        owner: torch.Tensor,
        path: int,
        sums: bytes | None,
    ) -> bytes:
        """Move pieces, each with the address that byte 0 of the file would have; sums: to read."""
        is_write = sums is None
        job = self._engine.ranges(
            write=is_write,
            files=[file],
            file_index=array("Q", bytes(8 * len(ranges))),
            offsets=array("Q", [begin for (begin, _), _ in ranges]),
            sizes=array("Q", [end - begin for (begin, end), _ in ranges]),
            addresses=array("Q", [at + begin for (begin, _), at in ranges]),
            sums=sums or b"",
            owner=owner,
            client=Client.OFFLOAD_WRITE if is_write else Client.OFFLOAD_READ,
            paths=[path],
            transfer_bytes=TRANSFER_BYTES,
        )
        job.wait(None)
        return job.checksums() if is_write else b""

    def _damaged(self, form: FileForm, found: _core.Mismatch) -> ChecksumError:
        begin, end = (at - form.data_begin for at in (found.begin, found.end))
        shown = [
            f"{part.field} of {self._names[part.span.parameter]} "
            f"[{part.span.begin}, {part.span.end})"
            for part in form.subgroup.parts_in(begin, end)
        ]
        return ChecksumError(
            "optimizer state on storage differs from its checksum",
            facts={
                "parameters": some(shown, PARTS_NAMED),
                "file": found.path,
                "bytes": f"[{found.begin}, {found.end})",
                "xxh3-64": f"expected {found.expected:016x}, got {found.got:016x}",
            },
            hint="these bytes have trained nothing. This update is incomplete: restore the newest "
            "committed step",
        )


# -- its files -------------------------------------------------------------------------------------
# Only the owner of the claim on the folder makes, writes or removes its files.
#
# A file that holds the newest state of a subgroup is never written. take() gives a file that holds
# no state any more, or a new one. A file that a save holds is neither written nor removed.
#
# A file with a second name is never written, because the other name may be part of a checkpoint. It
# waits, and takes no space of its own, until it has one name again. To write into a file that has
# its blocks is faster than to make a new one.
#
# Steps end in any order. So before a file is taken, LOOKS of those that wait are looked at, in
# turns, and all of these that have one name may be taken. To look at all that wait would take as
# long as to write a small file. To look only when there is no other file is too late: the turns
# pass the files of a step that stays, and each look that finds none costs a new file.
#
# A file with one name may be open, because a restore may still read a step that was removed. Only
# a lease shows that nobody has it. If none of LOOKS spare files can be leased, one is removed, and
# a new one is made in its place.


# As many as a state has subgroups, times the steps that most runs keep.
LINKED_MAX = 1024
LOOKS = 16
NAME = re.compile(r"subgroup-[0-9]{8}\.state")


class StateFiles:
    """The state files in `directory`. Thread-safe."""

    def __init__(self, fs: Fs, directory: str) -> None:
        if not fs.is_dir(directory):
            raise UsageError(
                "a path of an optimizer is not a directory",
                facts={"path": directory},
                hint="make the directory first: it may be missing because nothing is mounted there",
            )
        self._fs, self.directory = fs, directory
        self._claim = claim_folder(fs, directory)
        self._guard = threading.RLock()
        self._released: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._made = 0
        self._sizes: dict[str, int] = {}  # of all files
        self._spare: list[str] = []
        self._linked = deque[str]()  # not of any use, but for a step; who was looked at is last
        self._held = Counter[str]()
        self._retired: set[str] = set()  # held, and of no other use
        try:
            self._remove_all(self._claim.folder)
            for dead in dead_folders(fs, directory):
                self._remove_all(dead.folder)
        except BaseException:
            self._claim.release()
            raise

    def check(self) -> None:
        """Raises StorageError if the folder is another one by now, or none."""
        if self._claim.is_lost:
            raise StorageError(
                "the folder of an optimizer was unmounted, replaced or removed while it was in use",
                errno=errno.ESTALE,
                path=self._claim.folder,
            )

    def reserve(self, sizes: list[int]) -> None:
        """Make a file of each size, or none, so that the space is there when an update needs it."""
        self.check()
        made: dict[str, int] = {}
        try:
            for nbytes in sizes:
                path = self._new_name()
                open_file(self._fs, path, nbytes).close()
                made[path] = nbytes
        except BaseException:
            for path in made:
                with contextlib.suppress(StateholdError):  # the first error says more
                    self._fs.unlink(path)
            raise
        with self._guard:
            self._sizes.update(made)
            self._spare += made

    def take(self, nbytes: int) -> tuple[str, File]:
        """A file that may be overwritten, and its path."""
        self.check()
        reused = self._reusable(nbytes)
        path = reused or self._new_name()
        try:
            file = open_file(self._fs, path, nbytes, reuse=reused is not None)
        except NoSpaceError:
            if reused is not None:  # it was to grow
                self.give_back(reused)
            raise
        self._sizes[path] = nbytes
        return path, file

    def _reusable(self, nbytes: int) -> str | None:
        """A file that nobody else has; None if a new one is to be made."""
        self._look_at_linked()
        found, others = "", list[str]()  # which others have
        with self._guard:  # a thread that saw fewer would make a file too many
            while not found and len(others) < LOOKS and (path := self._pop(nbytes)) is not None:
                names = self._names_of(path)
                if not names:
                    del self._sizes[path]
                elif names > 1 and len(self._linked) < LINKED_MAX:
                    self._linked.append(path)
                elif names == 1 and self._fs.can_reuse(path):
                    found = path
                else:
                    others.append(path)
            if others and not found:
                self._fs.unlink(others[0])  # a step or a reader keeps the bytes
                del self._sizes[others.pop(0)]
            self._spare += others
        return found or None

    def _look_at_linked(self) -> None:
        """Find files that have no second name any more."""
        with contextlib.suppress(IndexError):  # another thread looks at them
            for _ in range(min(LOOKS, len(self._linked))):
                path = self._linked.popleft()
                if self._names_of(path) > 1:
                    self._linked.append(path)
                else:
                    self.give_back(path)

    def _names_of(self, path: str) -> int:
        """How many names a file has. A simulated disk only says whether nobody else has it."""
        if self._fs.backend == "sim":
            return 0 if self._fs.stat_bytes(path) is None else 2 - self._fs.can_reuse(path)
        with storing("look at a state file", path), contextlib.suppress(FileNotFoundError):
            return os.lstat(path).st_nlink
        return 0

    def open_held(self, path: str, nbytes: int) -> File:
        """A file that a save holds: to write its header."""
        self.check()
        return self._fs.open_write(path, nbytes, reuse=True)

    def give_back(self, path: str) -> None:
        """The state does not need the bytes of this file any more."""
        with self._guard:
            if path in self._held:
                self._retired.add(path)
            else:
                self._spare.append(path)

    def hold(self, path: str) -> None:
        """Keep this file until release(), also when it is given back."""
        with self._guard:
            self._held[path] += 1

    def release(self, path: str) -> None:
        """The end of one hold()."""
        with self._guard:
            self._held[path] -= 1
            if self._held[path]:
                return
            del self._held[path]
            if path in self._retired:
                self._retired.remove(path)
                self._spare.append(path)
        self._released.put(None)

    def close(self) -> None:
        """Remove all files, and let others use the folder. A path that fails gets a warning.

        Waits for the saves that hold files.
        """
        while self._held:
            self._released.get()
        try:
            self.check()
            self._remove_all(self._claim.folder)
        except StateholdError as error:
            logger.warning("cannot remove state files of an optimizer: %s", error)
        finally:
            self._claim.release()

    def _remove_all(self, folder: str) -> None:
        for name, is_dir in self._fs.listdir(folder):
            if NAME.fullmatch(name) and not is_dir:
                self._fs.unlink(f"{folder}/{name}")

    def _pop(self, nbytes: int) -> str | None:
        """The spare file that fits best. So all files together do not take more than reserved."""
        with self._guard:
            sizes = {path: self._sizes.get(path, 0) for path in self._spare}
            if not sizes:
                return None
            path = min(sizes, key=lambda path: (sizes[path] < nbytes, abs(sizes[path] - nbytes)))
            self._spare.remove(path)
            return path

    def _new_name(self) -> str:
        with self._guard:
            self._made += 1
            return f"{self._claim.folder}/subgroup-{self._made:08d}.state"


# -- the folder of an optimizer --------------------------------------------------------------------
# The folders are `PATH/optimizer-0`, `PATH/optimizer-1`, ... So the ranks of a node, and the
# optimizers of a process, can share a path. An optimizer has the first folder whose `.lock` no
# living optimizer has locked. The kernel drops that lock when its owner dies. Folders and their
# locks stay when an optimizer goes, and are used again: to remove them would race with the next
# owner.
#
# No two living optimizers have one folder, as far as the locks of the file system reach. Nobody
# else may look into a folder, and one that another user has made, or may write, is passed over.


FOLDER = re.compile(r"optimizer-[0-9]+")
LOCK_NAME = ".lock"
_OWNER = 0  # the byte of the lock that the owner has locked


class FolderClaim:
    """The right to use `folder`, until release()."""

    def __init__(self, folder: str, lock: LockFile) -> None:
        self.folder, self._lock = folder, lock
        self._owner_pid = os.getpid()

    @property
    def is_lost(self) -> bool:
        """Whether the folder is another one by now: unmounted, replaced or removed."""
        return self._lock.is_lost

    def release(self) -> None:
        """Give the folder up. Does nothing in a forked child, which never had it."""
        if os.getpid() == self._owner_pid:
            self._lock.close()


def claim_folder(fs: Fs, directory: str) -> FolderClaim:
    """Claim the first folder in `directory` that nobody has; it is made if need be."""
    claims = (_try_claim(fs, f"{directory}/optimizer-{number}") for number in itertools.count())
    return next(claim for claim in claims if claim is not None)


def dead_folders(fs: Fs, directory: str) -> Iterator[FolderClaim]:
    """The folders that nobody has any more, each claimed while it is looked at."""
    for name, is_dir in fs.listdir(directory):
        if is_dir and FOLDER.fullmatch(name):
            claim = _try_claim(fs, f"{directory}/{name}")
            if claim is not None:
                try:
                    yield claim
                finally:
                    claim.release()


def _try_claim(fs: Fs, folder: str) -> FolderClaim | None:
    if not _is_usable(fs, folder):
        return None
    path = os.path.join(folder, LOCK_NAME)
    with storing("lock the folder of an optimizer", path):
        lock = LockFile(path, disk=id(fs) if fs.backend == "sim" else 0)
        if not lock.try_take(_OWNER):
            lock.close()
            return None
    lock.note(f"process {os.getpid()} on {socket.gethostname()}\n")
    return FolderClaim(folder, lock)


def _is_usable(fs: Fs, folder: str) -> bool:
    """Whether the folder is there, and this user's. It is made if need be."""
    if fs.backend == "sim":
        if not fs.is_dir(folder):
            fs.mkdir(folder)
        return True
    with storing("make the folder of an optimizer", folder):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if os.path.isdir(folder) and is_own(folder):
                return True
            _warn_of_state(folder)
            return False
    return True


def _warn_of_state(folder: str) -> None:
    """Say it if a folder that is passed over has state files: they stay when their job is dead."""
    with contextlib.suppress(OSError):  # no directory, or this user may not look into it
        if any(map(NAME.fullmatch, os.listdir(folder))):
            log_once(
                f"an optimizer passes over {folder} (mode {os.lstat(folder).st_mode & 0o7777:o}), "
                "because it is another user's, or others may write it. The state files there stay: "
                "remove them if no job uses them, and mount with dir_mode=0700 if this is CIFS"
            )


# -- turns -----------------------------------------------------------------------------------------
# Several writers on one device make each other slower than they would be one after another
# (MLP-Offload, arXiv 2509.02480). So a transfer takes the turn of its path and direction. Threads
# that want the turn while it is being taken share it. Later ones join them, unless another
# optimizer waits. Then the turn ends with the transfers that are under way.
#
# Who waits holds NEXT, and then takes TURN. So the last owner, who has to take NEXT first, cannot
# overtake: nobody starves. A turn is held only around a transfer, and with no other turn, so there
# is no deadlock. The kernel drops the lock of an owner that dies. An owner that was stopped keeps
# it: who has waited WAIT_S goes on without the turn, and waits no more until the turn is free
# again.
#
# The locks are bytes of one file of this user in the memory of the node (process/file_locks): other
# nodes that use a parallel file system have turns of their own, and taking a turn is no I/O. Where
# turns cannot be taken, transfers go on without. They are only for speed.


WAIT_S = 5.0


class Turn:
    """The turn of one path and direction. lock: None takes no turns. byte: and the next one."""

    def __init__(self, lock: LockFile | None, byte: int) -> None:
        self._lock, self._turn, self._next = lock, byte, byte + 1
        self._changed = threading.Condition()
        self._users = 0  # threads that have the turn, or share the one that is being taken
        self._is_held = False
        self._patience_s = WAIT_S

    @property
    def is_wanted(self) -> bool:
        """Whether another optimizer waits for the turn."""
        return self._lock is not None and self._lock.is_taken(self._next)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Around a transfer."""
        if self._lock is None:
            yield
            return
        self._enter(self._lock)
        try:
            yield
        finally:
            self._leave(self._lock)

    def _enter(self, lock: LockFile) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_held and self.is_wanted))
            self._users += 1
            if self._users > 1:
                self._changed.wait_for(lambda: self._is_held)
                return
        with contextlib.suppress(OSError):  # the kernel is out of locks
            self._wait_for(lock)
        with self._changed:
            self._is_held = True
            self._changed.notify_all()

    def _wait_for(self, lock: LockFile) -> None:
        is_ours = False
        if lock.take(self._next, self._patience_s):
            try:
                is_ours = lock.take(self._turn, self._patience_s)
            finally:
                lock.drop(self._next)
        if not is_ours:
            log_once(f"an optimizer goes on without its turn on a path, after {WAIT_S:g} s")
        self._patience_s = WAIT_S if is_ours else 0.0

    def _leave(self, lock: LockFile) -> None:
        with self._changed:
            self._users -= 1
            if self._users == 0:
                self._is_held = False
                lock.drop(self._turn)
                self._changed.notify_all()


class PathTurns:
    """The turns of the optimizer that makes this, on the path `directory`: `read` and `write`.

    directory: None waits for nobody.
    """

    def __init__(self, directory: str | None) -> None:
        self._lock = None if directory is None else _open(directory)
        self.read, self.write = Turn(self._lock, 0), Turn(self._lock, 2)

    def close(self) -> None:
        """No transfer is under way."""
        if self._lock is not None:
            self._lock.close()


def _open(directory: str) -> LockFile | None:
    try:
        return LockFile.in_memory(directory)
    except (OSError, StorageError) as error:
        log_once(f"optimizers take no turns on their paths, because their locks fail: {error}")
        return None
