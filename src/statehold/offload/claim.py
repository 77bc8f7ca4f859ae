"""Each optimizer has a folder of its own on a path: `PATH/optimizer-0`, `PATH/optimizer-1`, ...

So the ranks of a node, and the optimizers of a process, can share a path. An optimizer has the
first folder whose `.lock` no living optimizer has locked. The kernel drops that lock when its
owner dies. Folders and their locks stay when an optimizer goes, and are used again: to remove them
would race with the next owner.

Invariants: no two living optimizers have one folder, as far as the locks of the file system reach.
Nobody else may look into a folder, and one that another user has made, or may write, is passed
over.
Not here: what is in the folders (files).
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statehold.errors import storage_error
from statehold.process.file_locks import LockFile
from statehold.process.ownership import is_own

if TYPE_CHECKING:
    from statehold._core import Fs

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
