"""At most one Checkpointer saves into a run directory.

A POSIX record lock on `RUN/.lock` keeps other processes out. The kernel drops it when its owner
dies, however it dies, and a forked child (a data-loading worker) does not inherit it. Record locks
do not exclude within one process, so a set of the paths held here does that.

Readers take no lock: a committed step never changes under its name.

An agent (checkpoint/agent) may hold the lock of a run whose trainer has died. It gives the lock up
when another process asks. If it does not within TAKE_OVER_S, because it was stopped, it is killed.
Bytes of the lock file say which process does what, and the kernel forgets each byte with its owner.
No process is identified by a number that another process may have by now:

    RIGHT    locked by the process that may save
    WANTED   shared by those that wait for an agent to give RIGHT up; it looks for them
    YIELDS   shared by agents, from before they take RIGHT until after they have given it up
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import socket
import stat
import struct
import threading
import time

from statehold.errors import RunBusyError, storage_error

logger = logging.getLogger("statehold")

LOCK_NAME = ".lock"
_RIGHT, _WANTED, _YIELDS = 0, 1, 2

# When asked, an agent gives the lock up, or ends, within a fifth of this (agent/process.py).
TAKE_OVER_S = 10.0
_LOOK_S = 0.01
_END_S = 2  # from SIGKILL to the end of a process

_OTHER_JOB = "stop the other job, or give this one a run directory of its own"

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid

_held: set[tuple[int, str]] = set()
_held_guard = threading.RLock()  # a lock may be dropped, and released, inside it


def _forget_held() -> None:
    """In a fork: the kernel knows what the parent holds, and no thread here is inside the guard."""
    global _held_guard
    _held.clear()
    _held_guard = threading.RLock()


os.register_at_fork(after_in_child=_forget_held)


class RunLock:
    """The right to save into `run`; acquired on construction, given up by release().

    disk: the simulated disk that the run lives on, which only this process can know; 0: none.
    yields: the holder is an agent, which looks for `is_wanted`.
    took_over: an agent was asked to give the right up.
    """

    def __init__(self, run: str, *, disk: int = 0, yields: bool = False) -> None:
        self._owner_pid = os.getpid()
        self._fd = -1
        self._is_held = False
        self._path = os.path.join(os.path.realpath(run), LOCK_NAME)
        self._yields = yields
        self.took_over = False
        self._disk = disk
        with _held_guard:
            if (disk, self._path) in _held:
                holder = f"another Checkpointer of this process ({os.getpid()})"
                hint = (
                    "call close() on that Checkpointer first, or use it instead. A notebook "
                    "keeps the values that its cells have shown: if you lost its name, look in Out"
                )
                raise _busy(run, holder, hint)
            _held.add((disk, self._path))
            self._is_held = True
            try:
                if not disk:
                    self._lock(run)
            except BaseException:
                self.release()
                raise

    def __del__(self) -> None:
        self.release()  # its owner could not note it, as after Ctrl-C

    def _lock(self, run: str) -> None:
        # Its content is overwritten. It must never be a file elsewhere, to which a link might lead.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = self._fd = _not_standard(os.open(self._path, flags, 0o644))
        except OSError as error:
            raise storage_error("open the run's lock", error.errno or 0, self._path) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise storage_error("lock: .lock is not a regular file", errno.EINVAL, self._path)
        try:
            is_ours = self._take(fd) or self._take_over(fd)
        except OSError as error:
            raise storage_error("lock the run", error.errno or 0, self._path) from error
        if not is_ours:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            raise _busy(run, holder or "another process")
        who = "the agent of a dead trainer, process" if self._yields else "process"
        owner = f"{who} {os.getpid()} on {socket.gethostname()}\n".encode()
        with contextlib.suppress(OSError):  # only for people who find the lock taken
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner, 0)

    def _take(self, fd: int) -> bool:
        """Take the right if no process has it."""
        if self._yields:
            fcntl.lockf(fd, fcntl.LOCK_SH, 1, _YIELDS)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _RIGHT)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if self._yields:  # an agent that sees it waits for us, and we have nothing to give up
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, _YIELDS)
            return False
        return True

    def _take_over(self, fd: int) -> bool:
        """Ask an agent for the right, and wait for it; False at once if a trainer has it."""
        fcntl.lockf(fd, fcntl.LOCK_SH, 1, _WANTED)
        until = time.monotonic() + TAKE_OVER_S
        while time.monotonic() < until:
            is_agents = _is_locked(fd, _YIELDS)
            if self._take(fd):
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, _WANTED)
                return True
            # An agent may have come, or gone, between the first look and the try.
            is_agents |= _is_locked(fd, _YIELDS)
            if not is_agents:
                return False
            self.took_over = True
            time.sleep(_LOOK_S)
        return self._end_agent(fd) and self._take(fd)

    def _end_agent(self, fd: int) -> bool:
        """End an agent that was stopped (SIGSTOP) while it had the right.

        It can neither hear a request nor end by itself. Its unfinished work is invisible. False for
        any other holder. The kernel says which process has the right, and says it again once a
        descriptor stands for that process. So no other process with the same number is ever killed.
        """
        agent = _holder(fd, _RIGHT)
        if not agent or agent != _holder(fd, _YIELDS):
            return False
        try:
            pidfd = os.pidfd_open(agent)
        except (OSError, AttributeError):
            return False
        try:
            if agent != _holder(fd, _RIGHT):
                return True  # it has given it up
            if not _is_stopped(agent):
                return False
            logger.warning(
                "the agent of %s, process %d, was stopped and held the run for %g s; ending it",
                os.path.dirname(self._path), agent, TAKE_OVER_S,
            )  # fmt: skip
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            return bool(poller.poll(1000 * _END_S))
        except OSError:
            return False
        finally:
            os.close(pidfd)

    @property
    def is_lost(self) -> bool:
        """Whether the locked file is no longer the one in the run directory."""
        if self._fd < 0:
            return False
        try:
            named = os.lstat(self._path)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # unknown; the next write there finds out
        mine = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino)

    @property
    def is_wanted(self) -> bool:
        """Whether another process waits for the right."""
        return self._fd >= 0 and _is_locked(self._fd, _WANTED)

    def release(self) -> None:
        """Give the lock up. Safe to call twice, and from a forked child (which never held it)."""
        if os.getpid() != self._owner_pid:
            return
        with _held_guard:
            if self._is_held:
                self._is_held = False
                _held.discard((self._disk, self._path))
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)


def is_saved_into(run: str) -> bool:
    """Whether a job, or an agent, has the run now. Asks the kernel, and takes nothing."""
    path = os.path.join(os.path.realpath(run), LOCK_NAME)
    with _held_guard:
        if any(
            held == path for _, held in _held
        ):  # to close the file once more would give the lock up
            return True
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            return stat.S_ISREG(os.fstat(fd).st_mode) and _is_locked(fd, _RIGHT)
        finally:
            os.close(fd)


def _not_standard(fd: int) -> int:
    """The descriptor, moved off the number of a standard stream, so that no output lands in the
    file."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _is_locked(fd: int, byte: int) -> bool:
    """Whether another process has this byte of the file locked."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _holder(fd: int, byte: int) -> int:
    """The process that has this byte of the file locked; 0: none, or one that is unknown here."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else max(0, pid)


def _is_stopped(pid: int) -> bool:
    """Whether a process is suspended, by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def _busy(run: str, holder: str, hint: str = _OTHER_JOB) -> RunBusyError:
    return RunBusyError(
        "another Checkpointer is already saving into the run directory",
        facts={"run": run, "held by": holder},
        hint=hint,
    )
