"""Locks on bytes of a file, which the kernel drops when their holder dies, however it dies.

They are "open file description" locks: two LockFiles exclude each other in one process as in two.
Unlike record locks they know nothing of deadlocks, and so never mistake two threads for one.

Invariants: a byte needs no content, so locks may lie anywhere in an empty file. A forked child
closes its copy of the file at once, and so never holds a lock of its parent.
Not here: the right to save into a run (checkpoint/store/lock).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from statehold.process.forks import forget_in_children

__all__ = ["LockFile"]

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


class LockFile:
    """The file at `path`, which is made if need be. Thread-safe. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(path, flags, 0o644)
        forget_in_children(self)

    def note(self, text: str) -> None:
        """Leave words in the file, for people who find a lock taken."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)

    def take(self, byte: int) -> None:
        """Lock a byte; waits until nobody else has it."""
        self._call(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, byte)

    def try_take(self, byte: int) -> bool:
        """Lock a byte if nobody else has it."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def drop(self, byte: int) -> None:
        """Unlock a byte."""
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def is_taken(self, byte: int) -> bool:
        """Whether somebody else has locked a byte."""
        found = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    @property
    def is_lost(self) -> bool:
        """Whether another file, or none, has its name by now."""
        try:
            named = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # unknown; the next use of the storage finds out
        mine = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Drop all locks. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: let the parent alone hold its locks."""
        with contextlib.suppress(OSError):
            self.close()

    def _call(self, command: int, kind: int, byte: int) -> bytes:
        return fcntl.fcntl(self._fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
