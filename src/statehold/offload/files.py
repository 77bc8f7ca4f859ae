"""The files of an optimizer on one path: each holds one generation of one subgroup.

Invariants:
- The files are in a folder of the optimizer, and only the owner of the claim on it makes, writes or
  removes them.
- A file that holds the newest state of a subgroup is never written. take() gives a file that holds
  no state any more, or a new one. A file that a save holds is neither written nor removed.
- A file with a second name is never written, because the other name may be part of a checkpoint. It
  waits, and takes no space of its own, until it has one name again. To write into a file that has
  its blocks is faster than to make a new one.
- The files are working memory. Nothing reads them after their process has ended: a restart begins
  from a committed step, and open() removes what a dead job has left.

Each optimizer has a folder of its own on a path: `PATH/optimizer-0`, `PATH/optimizer-1`, ...

So the ranks of a node, and the optimizers of a process, can share a path. An optimizer has the
first folder whose `.lock` no living optimizer has locked. The kernel drops that lock when its
owner dies. Folders and their locks stay when an optimizer goes, and are used again: to remove them
would race with the next owner.

Invariants: no two living optimizers have one folder, as far as the locks of the file system reach.
Nobody else may look into a folder, and one that another user has made, or may write, is passed
over.

Not here: which file holds what (pipeline), moving the bytes (store).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statehold.errors import NoSpaceError, StateholdError, StorageError, UsageError, storage_error
from statehold.io.memory_room import open_file
from statehold.process.file_locks import LockFile
from statehold.process.ownership import is_own

if TYPE_CHECKING:
    from statehold._core import File, Fs


# -- the folder of an optimizer --------------------------------------------------------------------


FOLDER = re.compile(r"optimizer-\d+")
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
    try:
        lock = LockFile(path, disk=id(fs) if fs.backend == "sim" else 0)
        if not lock.try_take(_OWNER):
            lock.close()
            return None
    except OSError as error:
        raise storage_error("lock the folder of an optimizer", error.errno or 0, path) from error
    lock.note(f"process {os.getpid()} on {socket.gethostname()}\n")
    return FolderClaim(folder, lock)


def _is_usable(fs: Fs, folder: str) -> bool:
    """Whether the folder is there, and this user's. It is made if need be."""
    if fs.backend == "sim":
        if not fs.is_dir(folder):
            fs.mkdir(folder)
        return True
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return os.path.isdir(folder) and is_own(folder)
    except OSError as error:
        raise storage_error("make the folder of an optimizer", error.errno or 0, folder) from error
    return True


# -- its files -------------------------------------------------------------------------------------


logger = logging.getLogger("statehold")

# As many as a state has subgroups, times the steps that most runs keep.
LINKED_MAX = 1024
NAME = re.compile(r"subgroup-\d{8}\.state")


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
        self._guard = threading.Condition()
        self._made = 0
        self._sizes: dict[str, int] = {}  # of all files
        self._spare: list[str] = []
        self._linked = deque[str]()  # not of any use, but for a step; the oldest first
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
        path = self._reusable(nbytes)
        if path is not None:
            try:
                return path, self._opened(path, nbytes, reuse=True)
            except NoSpaceError:  # it was to grow
                self.give_back(path)
                raise
        path = self._new_name()
        return path, self._opened(path, nbytes, reuse=False)

    def _reusable(self, nbytes: int) -> str | None:
        """A file that has no second name; None if there is none."""
        while (path := self._pop(nbytes)) is not None:
            if self._fs.can_reuse(path):
                return path
            self._set_aside(path)
        with contextlib.suppress(IndexError):  # steps are removed in the order of their saves
            while not self._fs.can_reuse(path := self._linked.popleft()):
                if self._fs.stat_bytes(path) is not None:
                    self._linked.appendleft(path)
                    return None
                del self._sizes[path]
            return path
        return None

    def _set_aside(self, path: str) -> None:
        """Keep a file that has a second name until it has none, unless too many wait already."""
        is_there = self._fs.stat_bytes(path) is not None
        if is_there and len(self._linked) < LINKED_MAX:
            self._linked.append(path)
            return
        if is_there:
            self._fs.unlink(path)  # under the other name the bytes stay
        del self._sizes[path]

    def open_held(self, path: str, nbytes: int) -> File:
        """A file that a save holds: to write its header."""
        self.check()
        return self._fs.open_write(path, nbytes, reuse=True)

    def _opened(self, path: str, nbytes: int, *, reuse: bool) -> File:
        file = open_file(self._fs, path, nbytes, reuse=reuse)
        self._sizes[path] = nbytes
        return file

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
            self._guard.notify_all()
            if path in self._retired:
                self._retired.remove(path)
                self._spare.append(path)

    def close(self) -> None:
        """Remove all files, and let others use the folder. A path that fails gets a warning.

        Waits for the saves that hold files.
        """
        with self._guard:
            self._guard.wait_for(lambda: not self._held)
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
