"""The agent's own process: waits until its trainer ends, copies the newest step, and ends.

    wait      until the trainer says goodbye (nothing to do), or has died, however it did
    persist   copy the newest step in memory to the other levels, until that is done, SIGTERM comes,
              or a trainer wants the run
    end       at once, or STOP_S after a request

Invariants: the agent ends in bounded time whatever storage does, except during a call that the
kernel does not interrupt. Nothing is touched without the locks of the run, and another process that
asks gets them. Whenever and however the agent ends, a level has the step or not. Unfinished work is
invisible, and the next trainer continues or clears it.

Not here: who starts the agent (starting).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import NoReturn

from statehold import _core
from statehold.checkpoint.agent.looking import LOG_NAME
from statehold.checkpoint.agent.orders import Orders
from statehold.checkpoint.levels.memory import directory_of
from statehold.checkpoint.levels.opening import open_places
from statehold.checkpoint.levels.promoting import Promoter
from statehold.checkpoint.levels.specs import Level, Memory
from statehold.checkpoint.telemetry.watch import Watch
from statehold.errors import (
    ClosedError,
    CorruptionError,
    RunBusyError,
    StateholdError,
    StepOrderError,
)
from statehold.observe.background_log import BackgroundLog
from statehold.process.warn import logger
from statehold.process.whole_files import open_regular
from statehold.process.worker import Flag
from statehold.steps.lock import TAKE_OVER_S
from statehold.steps.target import DirectoryPlace, Target

# -- the process -----------------------------------------------------------------------------------
# The trainer is watched through a pidfd that the trainer itself made. So no other process is taken
# for the trainer, and its forks do not hide its death. The end of the pipe says nothing: a fork may
# hold it, and the trainer may have closed it without a goodbye.
#
# The log is RUN/.agent.log, or lies in the level in memory if that cannot be written.


LOG_BYTES_MAX = 1 << 20  # beyond that the next agent begins a new log

STOP_S = TAKE_OVER_S / 5  # processes that wait for it wait longer
_LOOK_MS = 100
_PIPE = 0


def main(line: bytes, rest: bytes) -> NoReturn:
    """`line`: the orders; `rest`: the bytes after them in the pipe."""
    code = 1
    try:
        orders = Orders.decode(line)
        wake = _signals()
        if not rest and _has_died(orders.pidfd, wake):
            _act(orders, wake)
        code = 0
    finally:
        os._exit(code)  # whatever threads are doing


def _signals() -> int:
    """From now on SIGTERM and SIGINT make the returned descriptor readable."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return read


def _has_died(pidfd: int, wake: int) -> bool:
    """Wait; True if the trainer has died, False if there is nothing left to do for it."""
    poller = select.poll()
    for fd in (pidfd, wake, _PIPE):
        poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if wake in ready:
            return False
        if _PIPE in ready:
            if os.read(_PIPE, 64):
                return False
            poller.unregister(_PIPE)
        if pidfd in ready:
            return True


def _act(orders: Orders, wake: int) -> None:
    _open_log(orders)
    log = BackgroundLog()
    log.info("process %d has ended without close()", orders.trainer)
    try:
        persisting = Persisting(orders, log)
        threading.Thread(target=_watch, args=(persisting, wake, log), daemon=True).start()
        persisting.run()
    except StateholdError as error:
        log.error("the newest step stays in memory\n%s", error)
    except Exception as error:  # no other log has it
        log.error("the newest step stays in memory\nunexpected %r", error)
    log.flush()


def _watch(persisting: Persisting, wake: int, log: BackgroundLog) -> None:
    """Stop on a signal, on stuck storage, or for a trainer."""
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    why = ""
    while not why:
        if poller.poll(_LOOK_MS):
            why = "by a signal"
        elif persisting.is_stuck:
            why = "storage does not answer"
        with contextlib.suppress(OSError):  # asked again soon
            why = "a trainer has taken over the run" if persisting.is_wanted else why
    log.info("stopped: %s", why)
    end = threading.Timer(STOP_S, os._exit, [1])
    end.daemon = True
    end.start()
    persisting.stop()


def _open_log(orders: Orders) -> None:
    handler = None
    memory = orders.levels[0]
    assert isinstance(memory, Memory)
    for folder in (orders.run, directory_of(memory, orders.run)):
        path = Path(folder, LOG_NAME)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            is_long = path.exists() and path.stat().st_size > LOG_BYTES_MAX
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_long else 0)
            fd = open_regular(str(path), flags, 0o644)
            handler = logging.StreamHandler(os.fdopen(fd, "w", encoding="utf-8"))
            break
    if handler is None:
        return
    handler.setFormatter(logging.Formatter("%(asctime)s agent %(process)d: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


# -- the work after the death of the trainer -------------------------------------------------------


Aim = tuple["Level", "Target"]

# The process that holds the level has a newer step, or does this work itself, so asking again is of
# no use. A lock of a command is the exception: it passes.
_FINAL = (ClosedError, CorruptionError, RunBusyError, StepOrderError)


class Persisting:
    """One agent's work; run() once, the rest from any thread.

    It uses the trainer's own means: places, promotions and their limits. It goes through the levels
    one after the other, the nearest first, whatever their cadence. A failing level does not delay
    the next one. It is tried again every `retry_s`, until `give_up_s` after the death. If nothing
    moves for that long, the agent ends. If a step turns out to be damaged, the step before it is
    copied, unless the level has that already.
    """

    def __init__(self, orders: Orders, log: BackgroundLog) -> None:
        self._orders = orders
        self._log = log
        self._watch = Watch(orders.run, log=log)
        self._fs = _core.open_fs(orders.backend, orders.queue_depth)
        places = open_places(
            orders.levels, orders.run, self._fs, orders.buffer_bytes, reuse=False, yields=True
        )
        assert isinstance(places[0], DirectoryPlace)
        self._source = places[0]
        self._targets: list[Aim] = list(zip(orders.levels[1:], places[1:], strict=True))
        self._near = [place for place in places if isinstance(place, DirectoryPlace)]
        self._stopped = Flag()
        self._copying: Promoter | None = None
        self._copies = 0
        self._lost: list[str] = []  # levels that do not get the step
        self._moved_s = time.monotonic()

    @property
    def is_wanted(self) -> bool:
        """Whether a trainer waits for this to end."""
        return any(place.is_wanted for place in self._near)

    @property
    def is_stuck(self) -> bool:
        """Whether storage has not answered for the whole time of retries."""
        return time.monotonic() - self._moved_s > self._orders.give_up_s

    def run(self) -> None:
        """Copy the newest step to every level that lacks it."""
        if not self._source.steps():
            self._log.info("level %s has no step: nothing to do", self._source.name)
            return
        until = time.monotonic() + self._orders.give_up_s
        targets = self._lacking(self._targets)
        while targets and not self._stopped.is_set:
            if time.monotonic() + self._orders.retry_s > until:
                self._lost += [place.name for _, place in targets]
                break
            self._stopped.wait(self._orders.retry_s)
            targets = self._lacking(targets)
        if self._lost:
            self._log.error("ended; the newest step did not reach: %s", ", ".join(self._lost))
        elif not self._stopped.is_set:
            self._log.info("done")

    def stop(self) -> None:
        """End the work under way; returns when it has ended."""
        self._stopped.set()
        copying = self._copying
        if copying is not None:
            copying.close()

    def _lacking(self, targets: list[Aim]) -> list[Aim]:
        """Try each of the levels; returns those to try again."""
        try:
            if not self._source.is_prepared:
                self._source.prepare(None)
        except RunBusyError as error:
            if not error.passes:
                raise
            return targets
        return [target for target in targets if not self._bring(*target)]

    def _bring(self, level: Level, place: Target) -> bool:
        """Copy the newest intact step to a level; False: try again."""
        if self._stopped.is_set:
            return True
        self._moved_s = time.monotonic()
        error: StateholdError | None = None
        watch = self._watch.level(place.name)
        promoter = Promoter(level, place, None, self._go_on, watch)
        self._copying = promoter
        with contextlib.closing(promoter):
            for step in reversed(self._source.steps()):
                if not promoter.lacks(step, self._source):
                    self._log.info("level %s has step %d, or a newer one", place.name, step)
                    return True
                self._log.info("copying step %d to level %s", step, place.name)
                self._copies += 1
                carriers = self._source.carriers(step, ranks=1)
                promoter.start(step, self._copies, self._source, carriers)
                promoter.wait(None)
                error = promoter.status.error
                if not isinstance(error, CorruptionError):
                    break
        passes = isinstance(error, RunBusyError) and error.passes
        if isinstance(error, _FINAL) and not passes and not self._stopped.is_set:
            self._lost.append(place.name)
            return True
        return error is None

    def _go_on(self) -> None:
        """Before each block."""
        self._moved_s = time.monotonic()
        if self._stopped.is_set:
            raise ClosedError("the agent was stopped")
