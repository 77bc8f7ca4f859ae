"""Directories that are made with durable names, and deleted with their contents.

Not here: their purpose (store, integrations/dcp/writer).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statehold.errors import StorageError, storage_error

if TYPE_CHECKING:
    from statehold._core import Fs


def make_directories(fs: Fs, path: str) -> None:
    """Make a directory, its parents included, and make their names durable.

    Existing ones are synced, too: the process that made them may have died before it could sync
    them.
    """
    missing = []
    while path and not fs.is_dir(path):
        # Another rank may make it between the two calls.
        if fs.stat_bytes(path) is not None and not fs.is_dir(path):
            raise storage_error("create the directory: a file is in its place", errno.ENOTDIR, path)
        missing.append(path)
        path = path.rpartition("/")[0]
    # Everything above it was synced before it was made, and its contents, too.
    if path:
        with unless(errno.EACCES):  # we did not make a parent that we may not read
            fs.sync_dir(parent_of(path))
    for path in reversed(missing):
        with unless(errno.EEXIST):  # another rank made it
            fs.mkdir(path)
        fs.sync_dir(parent_of(path))


def delete(fs: Fs, directory: str, of: str = "") -> None:
    """Delete a directory that no name of a step leads to, with its contents.

    of: only what has names that begin so. Then the directory stays, because others may be about to
    make files there.
    """
    for name, is_dir in fs.listdir(directory):
        if not name.startswith(of):
            continue
        if is_dir:
            delete(fs, f"{directory}/{name}")
        else:
            with unless(errno.ENOENT):  # another rank took it meanwhile
                fs.unlink(f"{directory}/{name}")
    if not of:
        fs.rmdir(directory)


@contextlib.contextmanager
def unless(expected: int) -> Iterator[None]:
    """Ignore a storage error with this errno."""
    try:
        yield
    except StorageError as error:
        if error.errno != expected:
            raise


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path[:1] == "/" else ".")
