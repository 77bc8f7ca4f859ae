"""The agent's own process: waits for the end of its trainer, acts once, and ends.

    wait      until the trainer says goodbye (nothing to do), or has died, however it did
    persist   (persisting) until that is done, SIGTERM comes, or a trainer wants the run
    end       at once, or STOP_S after a request

The trainer is watched through a pidfd that the trainer itself made. So no other process is taken
for the trainer, and its forks do not hide its death. The end of the pipe says nothing: a fork may
    hold it, and the trainer may have closed it without a goodbye.

Invariants: the log is RUN/.agent.log, or lies in the level in memory if that cannot be written. The
agent ends in bounded time whatever storage does, except during a call that the kernel does not
interrupt. Unfinished work is invisible, and the next trainer continues or clears it.
Not here: what is copied, and where to (persisting); who starts the agent (starting).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from pathlib import Path
from typing import NoReturn

from statehold.checkpoint.agent.looking import LOG_NAME
from statehold.checkpoint.agent.orders import Orders
from statehold.checkpoint.agent.persisting import Persisting
from statehold.checkpoint.levels.specs import Memory
from statehold.checkpoint.levels.whereabouts import directory_of
from statehold.checkpoint.store.lock import TAKE_OVER_S
from statehold.errors import StateholdError
from statehold.observe.background_log import BackgroundLog

LOG_BYTES_MAX = 1 << 20  # beyond that the next agent begins a new log

STOP_S = TAKE_OVER_S / 5  # processes that wait for it wait longer
_LOOK_MS = 100
_PIPE = 0

logger = logging.getLogger("statehold")


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
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_APPEND
            fd = os.open(path, flags | (os.O_TRUNC if is_long else 0), 0o644)
            handler = logging.StreamHandler(os.fdopen(fd, "w", encoding="utf-8"))
            break
    if handler is None:
        return
    handler.setFormatter(logging.Formatter("%(asctime)s agent %(process)d: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
