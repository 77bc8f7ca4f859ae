"""How a directory of finished files becomes visible: the second half of the commit protocol.

Owns: D3 and D5 to D7 of docs/durability.md, for whoever has written the files (D1, D2) and knows
what the manifest says (D4): the steps of a run (store), or one checkpoint directory (dcp).
Holds: a crash at any point leaves `final` as it was, or whole and new; one rename decides, and an
existing directory is exchanged in one operation, never removed first.
Not here: which directories there are, and when they go.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statehold.errors import PUBLISHED, StorageError, named, storage_error
from statehold.steps.saved import MANIFEST_NAME

if TYPE_CHECKING:
    from statehold._core import Fs


def publish(fs: Fs, partial: str, final: str, manifest: bytes) -> bool:
    """D3 and D5 to D7; True if there was a directory `final`: it now is `partial`."""
    fs.sync_dir(partial)  # D3
    fs.write_file(f"{partial}/{MANIFEST_NAME}", manifest)  # D5
    fs.sync_dir(partial)  # D5: the manifest's name as well
    replaced = fs.is_dir(final)
    if replaced:
        fs.exchange(partial, final)  # D6: both names change at once
    else:
        fs.rename(partial, final)  # D6
    make_durable(fs, parent_of(final))  # D7
    return replaced


def make_durable(fs: Fs, directory: str) -> None:
    """D7: sync the directory that has the name of a published step; an error says that it has."""
    try:
        fs.sync_dir(directory)
    except Exception as error:
        failed = named(error, "while the name of a published step was made durable")
        raise failed.with_fact(PUBLISHED, "yes, and whole, but a power cut may undo it") from None


def make_directories(fs: Fs, path: str) -> None:
    """Make a directory, its parents included, and make their names durable.

    Also those that are there: who made them may have died before it could sync them.
    """
    missing = []
    while path and not fs.is_dir(path):
        # Another rank may make it between the two questions.
        if fs.stat_bytes(path) is not None and not fs.is_dir(path):
            raise storage_error("create the directory: a file is in its place", errno.ENOTDIR, path)
        missing.append(path)
        path = path.rpartition("/")[0]
    # All that is above it was synced before it was made, and so was what lies in it.
    if path:
        with unless(errno.EACCES):  # a parent that we may not read was not made by us
            fs.sync_dir(parent_of(path))
    for path in reversed(missing):
        with unless(errno.EEXIST):  # another rank made it
            fs.mkdir(path)
        fs.sync_dir(parent_of(path))


def delete(fs: Fs, directory: str) -> None:
    """Delete a directory that no name of a step leads to, with all that is in it."""
    for name, is_dir in fs.listdir(directory):
        if is_dir:
            delete(fs, f"{directory}/{name}")
        else:
            with unless(errno.ENOENT):  # another rank took it meanwhile
                fs.unlink(f"{directory}/{name}")
    fs.rmdir(directory)


@contextlib.contextmanager
def unless(expected: int) -> Iterator[None]:
    """Pass over a storage error with this errno."""
    try:
        yield
    except StorageError as error:
        if error.errno != expected:
            raise


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path[:1] == "/" else ".")
