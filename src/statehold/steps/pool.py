"""The files that steps of a run share, under names that no step's end takes away.

    RUN/.shared/5f3a09c1-7-rank-00003-1.safetensors

A step holds such a file as one of its own, by a second name. The next step gets its name from the
one here, because the step before may be retired, by this rank or by another, while the next save
needs the file. These names count for nothing in a restore.

Owns: the names, and D1 and D2 of files that are on storage already.
Invariants: a file here is that of a committed step, or is written once, before any step names it.
Each rank has its own files, and drops them. Names that a dead job has left are cleared with its
other leftovers.
Not here: which tensors such a file has (save/sharing).
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from statehold._core import File, Fs
from statehold.errors import StateholdError, StorageError
from statehold.io.memory_room import open_file
from statehold.io.objects.parallel import side_by_side
from statehold.process.ownership import is_own_file
from statehold.steps.directories import each_of, unless

# -- the pool --------------------------------------------------------------------------------------


POOL_NAME = ".shared"


class Pool:
    """The shared files of `rank` of `ranks` in the run directory `root`, on the file system that
    `fs` returns.

    mapped: `root` lies on a memory file system, and files are written as memory.
    """

    def __init__(
        self, fs: Callable[[], Fs], root: str, rank: int, ranks: int, *, mapped: bool
    ) -> None:
        self._find_fs = fs
        self._folder = f"{root}/{POOL_NAME}"
        self._rank = rank
        self._ranks = ranks
        self._mapped = mapped
        self._own = secrets.token_hex(4)
        self._names = set[str]()
        self._made = 0

    @property
    def _fs(self) -> Fs:
        return self._find_fs()

    def open(self, file_bytes: int, attempt: str | None) -> tuple[str, File]:
        """A new file, and its path. attempt: of the save, if several ranks save."""
        path = self._path(attempt)
        file = open_file(self._fs, path, file_bytes, mapped=self._mapped, ranks=self._ranks)
        self._names.add(path)
        return path, file

    def take(self, path: str, token: str | None) -> str | None:
        """A name here for the file of a committed step; None if it cannot have one, or is gone.

        token: of the job, if several ranks save.
        """
        with contextlib.suppress(StorageError):
            target = self._path(token and f"{token}-0")
            if linked(self._fs, path, target):
                self._names.add(target)
                return target
        return None

    def _path(self, attempt: str | None) -> str:
        """The path of another file."""
        with unless(errno.EEXIST):  # another rank made it
            self._fs.mkdir(self._folder)
        self._made += 1
        name = f"{attempt or self._own}-rank-{self._rank:05d}-{self._made}.safetensors"
        return f"{self._folder}/{name}"

    def drop(self, path: str) -> None:
        """No later save needs the file. Steps that hold it keep it."""
        if path in self._names:
            self._names.discard(path)
            with contextlib.suppress(StorageError):  # gone with the run, or cleared by a later job
                self._fs.unlink(path)

    def clear(self, token: str | None) -> None:
        """Clear what dead jobs have left. token: see job_token; other ranks may be ahead."""
        if token == "":
            return
        with contextlib.suppress(StorageError):  # no save fails because of leftovers
            if not self._fs.is_dir(self._folder):
                return
            names = [name for name, _ in self._fs.listdir(self._folder)]
            stale = (name for name in names if not name.startswith(f"{token or self._own}-"))
            each_of(stale, lambda name: self._fs.unlink(f"{self._folder}/{name}"))
            if token is None and not self._names:
                self._fs.rmdir(self._folder)

    def close(self) -> None:
        """Drop all files of this rank, and the directory unless other ranks have files there."""
        for path in list(self._names):
            self.drop(path)
        if self._made:
            with contextlib.suppress(StateholdError):  # not empty, or gone
                self._fs.rmdir(self._folder)


# -- second names ----------------------------------------------------------------------------------
# A file of another user, or one that everybody may write, gets no second name. A file that has a
# second name is never written again: the file system holds that (native/fs.h), and `Fs.can_reuse`
# says so to all who write over old files.


# ENOSYS: FUSE file systems that have no links.
_REFUSED = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
# A sync waits for the disk to empty its cache. The kernel does that once for all that wait.
SYNCED_AT_ONCE = 32


def linked(fs: Fs, path: str, target: str) -> bool:
    """D1: give the file at `path` the name `target`.

    False if the file system has no second name for it, or if it is not this user's: its owner could
    change it after it was verified.
    """
    try:
        fs.link(path, target)
        if fs.backend != "sim" and not is_own_file(target):
            fs.unlink(target)
            return False
    except StorageError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def sync_all(fs: Fs, paths: Sequence[str]) -> None:
    """D2: make the bytes of these files durable. Raises the error of the first that fails."""
    side_by_side([partial(_sync, fs, path) for path in paths], SYNCED_AT_ONCE)


def _sync(fs: Fs, path: str) -> None:
    file = fs.open_read(path)
    try:
        file.sync()
    finally:
        file.close()
