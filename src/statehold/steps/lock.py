"""At most one Checkpointer saves into a run directory.

Locks on bytes of `RUN/.lock` (process/file_locks) keep others out, in this process and in others.
The kernel drops them when their owner dies, however it dies, and a forked child (a data-loading
worker) does not keep them.

Readers take no lock: a committed step never changes under its name.

An agent (checkpoint/agent) may hold the lock of a run whose trainer has died. It gives the lock up
when another process asks. If it does not within TAKE_OVER_S, because it was stopped, it is killed.
A command asks no agent. An agent that meets a command tries again, and one that meets a trainer
gives up.
Bytes of the lock file say which process does what, and the kernel forgets each byte with its owner:

    RIGHT    locked by the process that may save
    WANTED   shared by those that wait for an agent to give RIGHT up; it looks for them
    YIELDS   shared by agents, from before they take RIGHT until after they have given it up
    PASSES   shared by commands in the same way
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import socket
import time

from statehold.errors import RunBusyError, StorageError, storage_error
from statehold.process.file_locks import LockFile
from statehold.process.warn import logger
from statehold.ranks.joining import launched

LOCK_NAME = ".lock"
_RIGHT, _WANTED, _YIELDS, _PASSES = range(4)

# When asked, an agent gives the lock up, or ends, within a fifth of this (agent/process.py).
TAKE_OVER_S = 10.0
_LOOK_S = 0.01
_END_S = 2  # from SIGKILL to the end of a process

_OTHER_JOB = "stop the other job, or give this one a run directory of its own"
_OTHER_OBJECT = (
    "call close() on that Checkpointer first, or use it instead. A notebook keeps the values that "
    "its cells have shown: if you lost its name, look in Out"
)
_OTHER_USER = (
    "its owner lets a group in by opening the run with a umask such as 002; or call "
    "chmod g+rw,o= on the file"
)
_AGENT = (
    "wait until it has ended: it copies the newest step from memory, and tries for ten minutes; "
    ".agent.log in the run says how far it is. If you kill it, the step stays in memory"
)
_OWN = "the file is yours: call chmod u+rw on it, if jobs are to save into this run again"


class RunLock:
    """The right to save into `run`; acquired on construction, given up by release().

    disk: the simulated disk that the run lives on, which only this process can know; 0: none.
    yields: the holder is an agent, which looks for `is_wanted`.
    passes: the holder is a command, which takes no run from an agent.
    took_over: an agent was asked to give the right up.
    """

    def __init__(
        self, run: str, *, disk: int = 0, yields: bool = False, passes: bool = False
    ) -> None:
        self._owner_pid = os.getpid()
        self._kind = _YIELDS if yields else _PASSES if passes else None
        self.took_over = False
        path = os.path.join(os.path.realpath(run), LOCK_NAME)
        try:
            self.file = LockFile(path, disk=disk)
        except OSError as error:
            raise _unopened(error, path) from error
        try:
            if not (self._take() or (not passes and self._take_over())):
                raise self._busy(run)
        except OSError as error:
            self.release()
            raise storage_error("lock the run", error.errno or 0, path) from error
        except BaseException:
            self.release()
            raise
        who = "the agent of a dead trainer, process" if yields else "process"
        self.file.note(f"{who} {os.getpid()} on {socket.gethostname()}\n")

    def __del__(self) -> None:
        self.release()  # its owner could not note it, as after Ctrl-C

    def _take(self) -> bool:
        """Take the right if no process has it."""
        if self._kind is not None:
            self.file.share(self._kind)
        is_taken = self.file.try_take(_RIGHT)
        if self._kind is not None and not is_taken:  # others would take it for the holder's
            self.file.drop(self._kind)
        return is_taken

    def _take_over(self) -> bool:
        """Ask an agent for the right, and wait for it; False at once if a trainer has it."""
        self.took_over = self.file.is_taken(_YIELDS)  # it may be gone as soon as it is asked
        self.file.share(_WANTED)
        until = time.monotonic() + TAKE_OVER_S
        while time.monotonic() < until:
            is_agents = self.file.is_taken(_YIELDS)
            if self._take():
                self.file.drop(_WANTED)
                return True
            # An agent may have come, or gone, between the first look and the try.
            is_agents |= self.file.is_taken(_YIELDS)
            if not is_agents:
                return False
            self.took_over = True
            time.sleep(_LOOK_S)
        return self._end_agent() and self._take()

    def _end_agent(self) -> bool:
        """End an agent that was stopped (SIGSTOP) while it had the right.

        It can neither hear a request nor end by itself. Its unfinished work is invisible. False for
        any other holder. The lock file has the number of the process. Once a descriptor stands for
        a process with that number, the kernel says whether it has the right. So no other process
        with the same number is ever killed.
        """
        noted = re.search(r"process ([0-9]+) on", self.file.noted())
        if noted is None or not self.file.is_taken(_YIELDS):
            return False
        agent = int(noted[1])
        try:
            pidfd = os.pidfd_open(agent)
        except (OSError, AttributeError):
            return False
        try:
            if not (self.file.is_taken_by(agent, _RIGHT) and _is_stopped(agent)):
                return False
            logger.warning(
                "the agent of %s, process %d, was stopped and held the run for %g s; ending it",
                os.path.dirname(self.file.path), agent, TAKE_OVER_S,
            )  # fmt: skip
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            return bool(poller.poll(1000 * _END_S))
        except OSError:
            return False
        finally:
            os.close(pidfd)

    def _busy(self, run: str) -> RunBusyError:
        summary, hint = "another Checkpointer is already saving into the run directory", _way_out()
        holder, is_commands = self.file.noted(), self.file.is_taken(_PASSES)
        if self.file.is_taken_by(os.getpid(), _RIGHT):
            holder, hint = f"another Checkpointer of this process ({os.getpid()})", _OTHER_OBJECT
        elif is_commands:
            summary, hint = "a command is at work in the run", "try again when it has ended"
        elif self._kind == _PASSES and self.file.is_taken(_YIELDS):
            summary, hint = "an agent is at work in the run", _AGENT
        facts = {"run": run, "held by": holder or "another process"}
        error = RunBusyError(summary, facts=facts, hint=hint)
        error.passes = is_commands or not self.file.is_taken(_RIGHT)  # or it has just ended
        return error

    @property
    def is_wanted(self) -> bool:
        """Whether another process waits for the right."""
        return self.file.is_taken(_WANTED)

    @property
    def is_of_host_only(self) -> bool:
        """Whether the file system has no locks, so jobs of other hosts are not kept away."""
        return not self.file.has_locks

    def release(self) -> None:
        """Give the lock up. Safe to call twice, and from a forked child (which never held it)."""
        if os.getpid() == self._owner_pid and hasattr(self, "file"):
            self.file.close()


def is_saved_into(run: str) -> bool:
    """Whether a job, or an agent, has the run now. Asks the kernel, and takes nothing.

    True, too, if the lock file may not be read: it is another user's, who may be at work.
    """
    path = os.path.join(os.path.realpath(run), LOCK_NAME)
    try:
        file = LockFile(path, is_made=False)
    except OSError as error:
        return isinstance(error, PermissionError)
    with contextlib.closing(file):
        return file.is_taken(_RIGHT)


def _is_stopped(pid: int) -> bool:
    """Whether a process is suspended, by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def _unopened(error: OSError, path: str) -> StorageError:
    found = storage_error("open the run's lock", error.errno or 0, path)
    if error.errno != errno.EACCES:
        return found
    is_own = os.path.lexists(path) and os.lstat(path).st_uid == os.geteuid()
    hint = _OWN if is_own else _OTHER_USER
    return StorageError(found.summary, errno=errno.EACCES, path=path, hint=hint)


def _way_out() -> str:
    """Perhaps the holder is no other job but a rank of this one, and the ranks do not know it."""
    rank, size = launched() or (0, 1)
    if size < 2:
        return _OTHER_JOB
    return (
        f"this process is rank {rank} of {size}, as its launcher says. If the holder is another of "
        "these ranks, let them find each other: call torch.distributed.init_process_group() before "
        'the first save, or pass coordination="directory". Otherwise ' + _OTHER_JOB
    )
