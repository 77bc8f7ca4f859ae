"""Files that are written whole or not at all: a reader sees the old content or the new one.

Owns: also how a file is opened whose directory others may write (open_regular).
Invariants: a name stays what it is. A link is followed to its file. A FIFO, a character device and
an open file of this process, such as /dev/stdout, get the bytes. Nothing else is ever replaced by a
file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable

from statehold.errors import UsageError

# Files that this process has open may have other content than what is written here.
_OPEN = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


def replace_file(path: str | os.PathLike[str], content: bytes) -> bool:
    """Make or replace a file. False: what is there got the bytes, and stays what it is.

    Raises OSError, and UsageError where no file can be.
    """
    with contextlib.suppress(FileNotFoundError):
        mode, is_open = os.stat(path).st_mode, os.fspath(path).startswith(_OPEN)
        if is_open or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            with open(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_APPEND), "wb") as file:
                file.write(content)
            return False
        if not stat.S_ISREG(mode):
            facts = {"path": os.fspath(path), "expected": "a file, a FIFO or a character device"}
            raise UsageError("this path cannot take a file", facts=facts)
    target = os.path.realpath(path)
    temporary = f"{target}.{secrets.token_hex(8)}.partial"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename = os.fspath(path)  # the caller knows no other name
        raise
    return True


def open_regular(path: str, flags: int, mode: int = 0o777) -> int:
    """As os.open(), also for open(opener=), but for a regular file only: no link is followed, and a
    FIFO would keep its reader waiting for ever. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def sync_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Make files, and the names in directories, durable. Raises OSError.

    What nobody here can sync is passed over: the home of other users above a directory (EACCES), or
    the directory of an automounter (EINVAL).
    """
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                raise


def try_folder(folder: str | os.PathLike[str]) -> None:
    """Make a directory if it is missing, and try a file in it. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
