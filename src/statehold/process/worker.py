"""One thread that makes calls in order, and whose callers may be interrupted anywhere.

An exception from a signal's handler can come between two instructions of a caller. An executor
takes a threading.Condition in submit(): its lock stays taken then, and its thread waits for ever.
A SimpleQueue is written in C: a handler runs before or after put(), never inside it.

Invariants: the interpreter makes the calls that are waiting before it ends. A worker that nobody
holds any longer makes them, too, and ends. Nobody waits for a worker that was left, whose call may
never return: so its thread is a daemon.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

from statehold.process.warn import let_go

Action = Callable[[], object]
_Actions = queue.SimpleQueue[Action | None]


class Worker:
    """A thread that starts now: no thread can start while a program ends. Raises RuntimeError."""

    def __init__(self, name: str) -> None:
        self._actions: _Actions = queue.SimpleQueue()
        self._is_closed = False
        # The thread does not hold the worker, and ends if the worker is dropped.
        self._thread = threading.Thread(target=_work, args=(self._actions,), name=name, daemon=True)
        self._thread.start()
        _awaited[self._thread] = self._actions

    def __del__(self) -> None:
        self._actions.put(None)

    def submit(self, action: Action) -> None:
        """Make the call after those that were submitted before. Raises RuntimeError after close."""
        if self._is_closed:
            raise RuntimeError(f"the thread {self._thread.name} has ended")
        self._actions.put(action)

    def passed(self, until: float | None) -> bool:
        """Whether all calls so far are made. Waits, at most until then on the monotonic clock, and
        not for a worker that was left."""
        if self._thread not in _awaited:
            return True
        latch = threading.Lock()  # of this call alone: nobody waits for it if it stays taken
        latch.acquire()
        self.submit(latch.release)
        return latch.acquire(timeout=-1.0 if until is None else max(0.0, until - time.monotonic()))

    def leave(self) -> None:
        """Have nobody wait for the thread any more, not even the end of the program."""
        self._is_closed = True
        _awaited.pop(self._thread, None)

    def close(self) -> None:
        """Return once all calls are made and the thread has ended, or the worker is left."""
        self._is_closed = True
        _end(self._thread, self._actions)


# By thread: the queue of each that was not left. A thread that runs keeps itself in here.
_awaited: weakref.WeakKeyDictionary[threading.Thread, _Actions] = weakref.WeakKeyDictionary()
# How often a wait for a thread looks whether the thread was left meanwhile.
_LOOK_S = 1.0


def _work(actions: _Actions) -> None:
    while (action := actions.get()) is not None:
        try:
            action()
        except BaseException as error:
            let_go(error)
        del action  # it may keep the state alive


def _end(thread: threading.Thread, actions: _Actions) -> None:
    actions.put(None)
    while thread in _awaited and thread.is_alive():
        thread.join(_LOOK_S)


def _end_all() -> None:
    for thread, actions in list(_awaited.items()):
        _end(thread, actions)


# Before the interpreter waits for its threads; after process/ending, which registers later.
getattr(threading, "_register_atexit", lambda _: None)(_end_all)
