"""Whose a file or directory is: what another user has made, or may write, is not used.

Invariants: links are not followed, so that a name that others may replace leads nowhere else. A
group may write, because its members may share a run. Where the file system gives what this process
makes to another user (NFS for root, FUSE), that user counts as this one.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile

from statehold.errors import StorageError, storage_error


def is_own(path: str, user: int | None = None) -> bool:
    """Whether a file or directory is this user's (or that one's), and not everybody's.

    Raises OSError.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_IWOTH:
        return False
    if found.st_uid == (os.geteuid() if user is None else user):
        return True
    return found.st_uid == _owner_of_new(os.path.dirname(path))


def is_own_file(path: str) -> bool:
    """The same of a regular file."""
    return stat.S_ISREG(os.lstat(path).st_mode) and is_own(path)


def check_own_directory(path: str, what: str) -> None:
    """Raise StorageError if another user has made the directory, or may write to it.

    A link in its place is followed if it is this user's. what: for the error, such as "of a level".
    """
    if not os.path.lexists(path):
        return
    found = os.lstat(path)
    is_link = stat.S_ISLNK(found.st_mode)
    target = os.path.realpath(path)
    if not is_link or found.st_uid == os.geteuid():
        if not os.path.lexists(target) or (os.path.isdir(target) and is_own(target)):
            return
        found = os.lstat(target)
    raise StorageError(
        f"another user may write to the directory {what}",
        errno=errno.EPERM,
        path=path,
        facts={
            "expected": f"a directory of user {os.geteuid()} that others cannot write",
            "got": f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}",
        },
        hint="name another place, or remove it; it may hold what another user has put there",
    )


def make_own_directory(path: str, what: str, mode: int = 0o700) -> None:
    """Make a directory of this user, and its parents as usual. mode: less the umask.

    A directory that exists keeps its mode. Raises StorageError, also as check_own_directory does.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        os.mkdir(path, mode)
    except FileExistsError:
        check_own_directory(path, what)
    except OSError as error:
        raise storage_error(f"create the directory {what}", error.errno or 0, path) from error


def _owner_of_new(directory: str) -> int:
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:  # nothing can be made there
        return os.geteuid()
