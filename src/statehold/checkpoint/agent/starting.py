"""The trainer's side of its agent: start it, check that it is alive, and say goodbye.

    Companion    the agent of a session, for as long as the run is saved
    Agent        start(), on a background thread -> [the run] -> goodbye()

Invariants: without an agent training continues, and the reason is logged once. An agent that gets a
goodbye has nothing left to copy. A session has an agent only while that could copy a whole step, so
not if each host has only a part of one.

Not here: its work (process).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from statehold.checkpoint.agent.looking import AGENT, ends_with_slurm
from statehold.checkpoint.agent.orders import Orders
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.specs import Level, Memory
from statehold.errors import StateholdError
from statehold.io.runtime import Runtime
from statehold.observe.background_log import BackgroundLog, log_once
from statehold.options import Options
from statehold.options.io import settled

# -- the agent of a session ------------------------------------------------------------------------


def companion_of(
    specs: Sequence[Level], runtime: Runtime, levels: Levels, log: BackgroundLog
) -> Companion:
    """The agent of the run, not started yet. A run has no agent if another rank leads, or if its
    disk is handed in."""
    agent = None
    if runtime.has_own_fs and levels.store.leads:
        agent = agent_for(levels.run, specs, runtime.options, log)
    return Companion(agent, levels)


class Companion:
    """`agent`: None if the run has none."""

    def __init__(self, agent: Agent | None, levels: Levels) -> None:
        self.agent = agent
        self._levels = levels

    def keep(self, ahead: Callable[[Callable[[], None]], None]) -> None:
        """See that the agent is there. `ahead` runs an action in the background, before the next
        commit."""
        hosts = self._levels.hosts
        if self.agent is not None and hosts is not None and hosts.are_apart:
            ahead(self.agent.goodbye)
            self.agent = None
        elif self.agent is not None and self.agent.is_missing:
            ahead(self.agent.start)

    def end(self) -> None:
        """The agent is no longer needed, unless a level lacks the newest step."""
        if self.agent is None:
            return
        if self._levels.lacks_newest():
            self.agent.leave()
        else:
            self.agent.goodbye()


# -- one agent -------------------------------------------------------------------------------------
# The agent is a program of its own, started with vfork, so it copies nothing of this process except
# its orders. These go through a pipe, not through arguments or the environment. It has a session of
# its own, so signals for this process's group or terminal do not reach it. It is no child of this
# process: this process need not wait for it, and a supervisor that ends this process with all its
# children does not end it. Its standard streams lead nowhere, because a reader of this process's
# output waits for the end of that output.


_GOODBYE = b"goodbye\n"
STARTS_MAX = 3
FIRST_S = 5.0

# The first process ends at once, so the agent has no parent. Process 1 would become its parent and
# not wait for it, so an agent of process 1 stays a child. It finds modules where the trainer does,
# whatever the trainer's working directory was.
_PROGRAM = """
import json, os, sys
if os.getppid() != 1 and os.fork():
    os._exit(0)
received = b""
while b"\\n" not in received:
    block = os.read(0, 65536)
    if not block:
        os._exit(1)
    received += block
line, _, rest = received.partition(b"\\n")
known = [each for each in sys.path if each]
sys.path = known + [each for each in json.loads(line)["path"] if each not in known]
from statehold.checkpoint.agent.process import main
main(line, rest)
"""

_PIDFD_OPEN = 434  # the same number on all architectures


class Agent:
    """The agent of this process's Checkpointer of a run.

    orders: makes its orders from the number of its pidfd. For one thread at a time.
    """

    def __init__(self, orders: Callable[[int], Orders], log: BackgroundLog) -> None:
        self._orders = orders
        self._log = log
        self._pipe = -1
        self._first: subprocess.Popen[bytes] | None = None
        self._starts = 0

    @property
    def is_missing(self) -> bool:
        """Whether an agent must be started: there is none yet, or it was lost."""
        return self._starts < STARTS_MAX and not self._is_there()

    def start(self) -> None:
        """Start an agent, or another one in place of a lost one."""
        if not self.is_missing:
            return
        if self._starts:
            self._close()
            self._log.warning("the agent of this run was lost; starting another one")
        self._starts += 1
        if ends_with_slurm():
            log_once(
                "the agent of this run ends with the SLURM step: if this process is killed, its "
                "newest step stays in memory. Start the trainer from a script that waits for the "
                "agent, as the guide shows under 'When the trainer is killed'"
            )
        try:
            self._start()
        except (OSError, StateholdError) as error:
            self._starts = STARTS_MAX
            self._log.warning(
                "cannot start an agent: if this process is killed, its newest step stays in "
                "memory\n%s",
                error,
            )

    def goodbye(self) -> None:
        """All levels have the newest step: the agent ends."""
        if self._pipe >= 0:
            with contextlib.suppress(OSError):  # it was lost before
                os.write(self._pipe, _GOODBYE)
        self.leave()

    def leave(self) -> None:
        """Let it wait for the end of this process: a level lacks the newest step."""
        self._close()

    def _is_there(self) -> bool:
        first = self._first
        if first is not None and first.poll() is not None:
            self._first = None
        if self._pipe < 0:
            return False
        poller = select.poll()
        poller.register(self._pipe, 0)
        return not poller.poll(0)  # an error: no process has the other end

    def _start(self) -> None:
        read, self._pipe = os.pipe()
        pidfd = -1
        try:
            pidfd = _own_pidfd()
            orders = self._orders(pidfd)
            line = orders.encode()
            self._first = subprocess.Popen(
                [_interpreter(), "-c", _PROGRAM, AGENT, orders.run],
                cwd="/",
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[pidfd],
                start_new_session=True,
            )
        finally:
            os.close(read)
            if pidfd >= 0:
                os.close(pidfd)
        while line:
            line = line[os.write(self._pipe, line) :]

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        first, self._first = self._first, None
        if first is not None and os.getpid() == 1:  # it is the agent, which may live on
            with contextlib.suppress(RuntimeError):  # this process ends, and its container with it
                threading.Thread(target=first.wait, name="statehold-agent", daemon=True).start()
        elif first is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                first.wait(FIRST_S)


def _interpreter() -> str:
    if not sys.executable:
        raise OSError(errno.ENOENT, "the path of the Python interpreter is unknown")
    return sys.executable


def agent_for(
    run: str, levels: Sequence[Level], options: Options, log: BackgroundLog
) -> Agent | None:
    """An agent, not started yet, if the levels of the run want one."""
    first = levels[0]
    if not (isinstance(first, Memory) and first.agent and len(levels) > 1):
        return None

    moving = settled(options.io)

    def orders(pidfd: int) -> Orders:
        return Orders(
            trainer=os.getpid(),
            pidfd=pidfd,
            path=_module_path(),
            run=run,
            levels=levels,
            backend=moving.backend,
            queue_depth=moving.queue_depth,
            buffer_bytes=moving.buffer_bytes,
        )

    return Agent(orders, log)


def _module_path() -> list[str]:
    """Where this process finds modules, for a process in another directory."""
    here = str(Path(__file__).resolve().parents[2])
    found = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]
    return [*found, here]


def _own_pidfd() -> int:
    """A descriptor for the end of this process, and of no later process with its number."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(os.getpid())
    # A Python that was built with old headers does not have it.
    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(_PIDFD_OPEN, os.getpid(), 0))
    if found < 0:
        raise OSError(ctypes.get_errno(), "pidfd_open")
    return found
