"""Second names for files that are on storage already: D1 and D2 of files that a step shares.

Invariants: a file of another user, or one that everybody may write, gets no second name. A file
that has a second name is never written again: the file system holds that (native/fs.h), and
`Fs.can_reuse` says so to all who write over old files.
Not here: the directory of the step (store), a copy where there is no second name (levels/places).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from statehold.errors import StorageError
from statehold.process.ownership import is_own_file

if TYPE_CHECKING:
    from statehold._core import Fs

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
    if paths:
        with ThreadPoolExecutor(min(SYNCED_AT_ONCE, len(paths)), "statehold-sync") as threads:
            list(threads.map(partial(_sync, fs), paths))


def _sync(fs: Fs, path: str) -> None:
    file = fs.open_read(path)
    try:
        file.sync()
    finally:
        file.close()
