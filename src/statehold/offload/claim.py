"""At most one optimizer uses a directory for its state.

A POSIX record lock on `DIRECTORY/.offload.lock` keeps other processes out. The kernel drops it when
its owner dies, and a forked child does not inherit it. Record locks do not exclude within one
process, so a set of the directories that are held here does that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from statehold.errors import UsageError, storage_error

__all__ = ["Claim"]

LOCK_NAME = ".offload.lock"

_held: set[tuple[int, str]] = set()
_held_guard = threading.RLock()  # the collector may release a claim inside
os.register_at_fork(after_in_child=_held.clear)


class Claim:
    """The right to use `directory`; taken on construction, given up by release().

    disk: the simulated disk that the directory lies on, which only this process can know; 0: none.
    """

    def __init__(self, directory: str, disk: int = 0) -> None:
        self._key = (disk, directory if disk else os.path.realpath(directory))
        self._owner_pid = os.getpid()
        self._fd = -1
        with _held_guard:
            if self._key in _held:
                raise _busy(directory, f"another optimizer of this process ({os.getpid()})")
            if not disk:
                self._lock(directory)
            _held.add(self._key)

    def release(self) -> None:
        """Give the directory up. Does nothing in a forked child, which never had it."""
        if os.getpid() != self._owner_pid:
            return
        with _held_guard:
            _held.discard(self._key)
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def _lock(self, directory: str) -> None:
        path = os.path.join(directory, LOCK_NAME)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise storage_error("open the lock of a path", error.errno or 0, path) from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise _busy(directory, holder or "another process") from error
        with contextlib.suppress(OSError):  # only for people who find the lock taken
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
        self._fd = fd


def _busy(directory: str, holder: str) -> UsageError:
    return UsageError(
        "another optimizer keeps its state on this path",
        facts={"path": directory, "held by": holder},
        hint="close() that optimizer, or give each optimizer and each rank a directory of its own",
    )
