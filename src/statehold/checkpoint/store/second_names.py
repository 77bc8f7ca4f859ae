"""A second name for a file that is on storage already: D1 and D2 of a file that a step shares.

Invariants: a file that has a second name is never written again. The file system holds that
(native/fs.h), and `Fs.can_reuse` says so to all who write over old files.
Not here: the directory of the step (store), a copy where there is no second name (levels/places).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from statehold.errors import StorageError

if TYPE_CHECKING:
    from statehold._core import Fs

# ENOSYS: FUSE file systems that have no links.
_REFUSED = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


def linked(fs: Fs, path: str, target: str) -> bool:
    """Give the file at `path` the name `target`, and make its bytes durable.

    False if the file system has no second name for it.
    """
    try:
        fs.link(path, target)  # D1
    except StorageError as error:
        if error.errno in _REFUSED:
            return False
        raise
    file = fs.open_read(target)
    try:
        file.sync()  # D2
    finally:
        file.close()
    return True
