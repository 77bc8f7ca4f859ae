"""At most one Checkpointer saves into a run directory.

A POSIX record lock on `RUN/.lock` keeps other processes out: the kernel drops it when its owner
dies, however it dies, and a forked child (a data-loading worker) does not inherit it. Record locks
do not exclude within one process, so a set of the paths held here does that.

Readers take no lock: a committed step never changes under its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading

from statehold.errors import RunBusyError, storage_error

_held: set[str] = set()
_held_guard = threading.Lock()


def _forget_held() -> None:
    """In a fork: what its parent holds, the kernel knows; nobody here is inside the guard."""
    global _held_guard
    _held.clear()
    _held_guard = threading.Lock()


os.register_at_fork(after_in_child=_forget_held)


class RunLock:
    """The right to save into `run`; acquired on construction, given up by release().

    in_memory: the run lives on a simulated disk, so only this process can know it.
    """

    def __init__(self, run: str, *, in_memory: bool = False) -> None:
        self._path = os.path.join(os.path.realpath(run), ".lock")
        self._owner_pid = os.getpid()
        self._fd = -1
        with _held_guard:
            if self._path in _held:
                raise _busy(run, f"another Checkpointer of this process ({os.getpid()})")
            if not in_memory:
                self._fd = self._lock(run)
            _held.add(self._path)

    def _lock(self, run: str) -> int:
        # Its content is overwritten: never that of a file elsewhere, to which a link might lead.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = _not_standard(os.open(self._path, flags, 0o644))
        except OSError as error:
            raise storage_error("open the run's lock", error.errno or 0, self._path) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise storage_error("lock what is no regular file", errno.EINVAL, self._path)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise _busy(run, holder or "another process") from error
        owner = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        with contextlib.suppress(OSError):  # only a courtesy to whoever finds the lock taken
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner, 0)
        return fd

    def release(self) -> None:
        """Give the lock up. Safe to call twice, and from a forked child (which never held it)."""
        if os.getpid() != self._owner_pid:
            return
        with _held_guard:
            _held.discard(self._path)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _not_standard(fd: int) -> int:
    """The descriptor, moved off a standard stream's number: what is printed must not land here."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _busy(run: str, holder: str) -> RunBusyError:
    return RunBusyError(
        "the run directory is already being saved into",
        facts={"run": run, "held by": holder},
        hint="stop the other job, or give this one a run directory of its own",
    )
