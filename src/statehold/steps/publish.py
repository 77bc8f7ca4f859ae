"""How a directory of finished files becomes visible: the second half of the commit protocol.

Owns: D3 and D5 to D7 of docs/durability.md; E1 to E4, which replace a directory where two names
cannot be exchanged; where a reader looks meanwhile. The caller has written the files (D1, D2) and
knows the content of the manifest (D4). Callers are the steps of a run (store) and one checkpoint
(dcp).
Invariants: a crash at any point leaves `final` as it was, or whole and new; one rename decides. The
old directory is exchanged in one operation, or keeps a name that counts.
Not here: which directories exist, and when they are deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from pathlib import Path
from typing import TypeVar

from statehold._core import Fs
from statehold.errors import (
    PUBLISHED,
    MissingFileError,
    StateholdError,
    StorageError,
    named,
    storage_error,
)
from statehold.format.saved import MANIFEST_NAME
from statehold.steps.directories import REPLACED, delete, parent_of

# -- D3 and D5 to D7 -------------------------------------------------------------------------------


def publish(fs: Fs, partial: str, final: str, manifest: bytes) -> Replaced:
    """D3 and D5 to D7. Returns what became of the old directory `final`."""
    fs.write_file(f"{partial}/{MANIFEST_NAME}", manifest)  # D5
    fs.sync_dir(partial)  # D5: the names of all files; of a single process, this is D3 as well
    is_there = fs.is_dir(final)
    if is_there and exchanged(fs, partial, final):  # D6: both names change at once
        make_durable(fs, parent_of(final))  # D7
        # A file system that ignores the flag may have renamed over the old directory.
        return Replaced.HIDDEN if fs.is_dir(partial) else Replaced.NOTHING
    with came_back(fs, final):
        is_aside = set_aside(fs, final, is_there=is_there)  # E1, E2
        fs.rename(partial, final)  # D6
    make_durable(fs, parent_of(final))  # D7
    return hidden(fs, final, partial) if is_aside else Replaced.NOTHING  # E3, E4


def make_durable(fs: Fs, directory: str) -> None:
    """D7: sync the directory that has the name of a published step. An error has the fact
    PUBLISHED."""
    try:
        fs.sync_dir(directory)
    except Exception as error:
        failed = named(error, "while the name of a published step was made durable")
        raise failed.with_fact(PUBLISHED, "yes, and whole, but a power cut may undo it") from None


# -- where two names cannot be exchanged -----------------------------------------------------------
# Many FUSE file systems and NFS refuse RENAME_EXCHANGE. There `final` is replaced by plain renames
# (docs/durability.md has the same numbers). E1 renames final to final.replaced, and E2 syncs the
# parent. D6 renames the partial to final, and D7 syncs the parent. E3 renames final.replaced to the
# partial, and E4 syncs the parent.
#
# final.replaced counts as `final` while `final` is missing, and at no other time. Its files are
# whole whenever it may count. They are overwritten or deleted after E4 only. Before `final` goes
# away for any other reason, settle() makes sure that final.replaced does not come back.


T = TypeVar("T")

# What a file system says of a file or directory that is gone.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
LOOKS_MAX = 100


class Replaced(Enum):
    """What became of the old directory `final`."""

    NOTHING = "there was none"
    HIDDEN = "it has the name of the partial, for good"
    LEFT = "its name is not settled: sync the parent, and settle(), before `final` goes away"


# The last two come from a file system that ignores the flag: it takes an exchange for a rename to a
# name that is taken.
_REFUSED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTEMPTY, errno.EEXIST)


# -- by the one that publishes -------------------------------------------------------------------


def exchanged(fs: Fs, partial: str, final: str) -> bool:
    """D6 in one operation; False if the file system has none."""
    try:
        fs.exchange(partial, final)
    except StorageError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def set_aside(fs: Fs, final: str, *, is_there: bool) -> bool:
    """E1 and E2; False if there is nothing to replace. is_there: whether `final` exists."""
    aside = final + REPLACED
    has_aside = fs.is_dir(aside)  # an earlier save has failed between E1 and E4
    if not is_there and not has_aside:
        return False
    if is_there:
        settle(fs, final)
        fs.rename(final, aside)  # E1
    fs.sync_dir(parent_of(final))  # E2
    return True


@contextlib.contextmanager
def came_back(fs: Fs, final: str) -> Iterator[None]:
    """After an error from E1 to D6, give `final` its old directory back.

    If that fails, too, readers find it under its other name, and the next save or recovery tries
    again.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageError):
            if not fs.is_dir(final) and fs.is_dir(final + REPLACED):
                fs.rename(final + REPLACED, final)
        raise


def hidden(fs: Fs, final: str, partial: str) -> Replaced:
    """E3 and E4, after D7. `final` is committed, so an error does not fail the save."""
    try:
        fs.rename(final + REPLACED, partial)  # E3
        fs.sync_dir(parent_of(final))  # E4
    except StorageError:
        return Replaced.LEFT
    return Replaced.HIDDEN


def settle(fs: Fs, final: str) -> None:
    """Remove final.replaced, and let no crash bring it back. Only a writer calls this.

    If `final` is missing, final.replaced is renamed back. Otherwise it is deleted, once `final` is
    durable. A half-deleted directory never counts, because `final` stays until this has succeeded.
    """
    aside = final + REPLACED
    if not fs.is_dir(aside):
        return
    if fs.is_dir(final):
        fs.sync_dir(parent_of(final))  # D7 may not have happened
        delete(fs, aside)
    else:
        fs.rename(aside, final)
    fs.sync_dir(parent_of(final))


# -- by readers ----------------------------------------------------------------------------------


def where(fs: Fs, final: str) -> str:
    """The directory that counts as `final` now."""
    is_aside = not fs.is_dir(final) and fs.is_dir(final + REPLACED)
    return final + REPLACED if is_aside else final


def read_standing(fs: Fs, final: str, look: Callable[[str], T]) -> T:
    """The result of `look` at the directory that counts as `final`.

    It looks again if a file was missing because the directory got another name in between. Raises
    as `look` does.
    """
    directory = final
    for _ in range(LOOKS_MAX):
        try:
            return look(directory)
        except (StorageError, MissingFileError) as error:
            missing = missing_path(error)
            if missing is None:
                raise
            before, directory = directory, where(fs, final)
            if directory == before and fs.stat_bytes(missing) is None:
                raise
    return look(directory)


def missing_path(error: Exception) -> str | None:
    """The missing file, if that is the error."""
    if isinstance(error, StorageError):
        return error.path if error.errno in GONE else None
    if isinstance(error, MissingFileError) and "expected" not in error.facts:  # otherwise: no file
        return str(error.facts.get("file", ""))
    return None


# -- beside a writer -------------------------------------------------------------------------------
# A job saves a step again by exchanging two directories, and retires steps by renaming them.
# Readers take no lock. A name that was listed may be gone when it is opened, and two files that
# were read one after the other may be of two saves. So a failure counts only where what was looked
# at is still the same; if it was replaced, the look begins again.


def look_beside_a_writer(
    look: Callable[[], T], which: Callable[[], Hashable | None], what: str = ""
) -> T | None:
    """The result of `look`; None if there is nothing to look at any more.

    which: tells one save from another; None when it is gone. what: its name, for the error after
        LOOKS_MAX saves. Raises as `look` does if it failed on one and the same save. A handle
        that a network file system calls stale was of another one.
    """
    for _ in range(LOOKS_MAX):
        before = which()
        if before is None:
            return None
        try:
            return look()
        except (StateholdError, OSError) as error:
            if which() == before and getattr(error, "errno", 0) != errno.ESTALE:
                raise
    raise storage_error("read a step that is replaced again and again", errno.ESTALE, what)


def directory_id(path: str) -> Hashable | None:
    """Tells the directory at `path` from a later one with its name; None if there is none."""
    ask_server(path)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def ask_server(path: str) -> None:
    """Let a network file system look at `path` and the directories above it now.

    A client answers from memory for half a minute: that there is no run, or that a step is there.
    It asks its server whenever a directory is opened.
    """
    for directory in (*map(str, reversed(Path(path).parents)), path):
        try:
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except PermissionError:
            continue
        except (OSError, ValueError):  # there is none, or no file system has such a name
            return


def is_directory(path: str, is_dir: Callable[[str], bool] = os.path.isdir) -> bool:
    """Whether there is a directory; before it says no, the server is asked."""
    if not is_dir(path):
        ask_server(path)
    return is_dir(path)


def entries_of(fs: Fs, path: str) -> list[tuple[str, bool]]:
    """The entries of a directory, as Fs.listdir() gives them; none where there is none."""
    entries = look_beside_a_writer(
        lambda: fs.listdir(path),
        lambda: fs.is_dir(path) or is_directory(path, fs.is_dir) or None,
        path,
    )
    return entries or []
