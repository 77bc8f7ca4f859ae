"""What tasks of a Scheduler use in place of threading, queue and time, while it runs.

Locks, conditions, events, semaphores, futures and executors of the standard library are made of few
parts: locks, threads, a queue and a clock. These parts are replaced by name, and the modules of
statehold get locks of their own in place of those that they made when they were imported. A thread
that is no task uses what it gets as it always did, so what outlives a run still works.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import itertools
import queue
import random
import secrets
import sys
import threading
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cached_property, lru_cache, partial
from typing import Any
from unittest import mock

import numpy.random  # noqa: F401  (imported inside a run, its lock would be one of ours)

from support.scheduler import Scheduler, Unwound

EPOCH_S = 1_700_000_000.0
LOCKS_SHARE = 0.1  # most locks are taken for a moment, and nobody waits for them
_RealQueue = queue.SimpleQueue
_real_start, _real_join = threading.Thread.start, threading.Thread.join
_real_is_alive = threading.Thread.is_alive
_tasks_of_threads: dict[threading.Thread, Any] = {}
_running: Scheduler | None = None


def scheduler() -> Scheduler | None:
    """The scheduler of this thread, if it is a task."""
    return _running if _running is not None and _running.current() is not None else None


class TurnLock:
    """threading.Lock; to take it is a point of synchronisation."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self.locked, self.release = self._lock.locked, self._lock.release
        self._at_fork_reinit = self._lock._at_fork_reinit  # type: ignore[attr-defined]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        turns = scheduler()
        if turns is None:
            return self._lock.acquire(blocking, timeout)
        if blocking:
            turns.pause("may take a lock", LOCKS_SHARE)
        if self._lock.acquire(False):
            return True
        if not blocking:
            return False
        in_time = turns.wait(self._is_free, None if timeout < 0 else timeout, "a lock")
        return in_time and self._lock.acquire(False)

    def _is_free(self) -> bool:
        return not self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TurnQueue(_RealQueue):  # type: ignore[type-arg]
    """queue.SimpleQueue; finalizers put into it, and take no lock for that."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        turns = scheduler()
        if turns is None or not block:
            return super().get(block, timeout)
        if not turns.wait(lambda: not self.empty(), timeout, "a queue"):
            raise queue.Empty
        return super().get(False)


def start(thread: threading.Thread) -> None:
    turns = scheduler()
    if turns is None:
        return _real_start(thread)
    task = turns.start(type(thread).__name__)
    _tasks_of_threads[thread] = task
    whole: Any = thread
    whole._bootstrap = partial(turns.run, task, whole._bootstrap)
    whole.run = partial(_until_unwound, whole.run)
    return _real_start(thread)


def _until_unwound(run: Callable[[], None]) -> None:
    with contextlib.suppress(Unwound):
        run()


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    turns, task = scheduler(), _tasks_of_threads.get(thread)
    if turns is None or task is None:
        return _real_join(thread, timeout)
    if turns.wait(lambda: task.is_over, timeout, f"the end of {task.name}"):
        _real_join(thread)
    return None


def is_alive(thread: threading.Thread) -> bool:
    task = _tasks_of_threads.get(thread)
    return _real_is_alive(thread) and not (task is not None and task.is_over)


class InOrder(dict[Any, None]):
    """A set of threads whose order does not depend on where they lie in memory."""

    def add(self, member: Any) -> None:
        self[member] = None


def _count_futures() -> tuple[Callable[[Any], None], Callable[[Any], int]]:
    """__init__ and __hash__ of futures: sets of them, too, have the same order in each run."""
    made = itertools.count(1)
    real = Future.__init__

    def begin(future: Any) -> None:
        real(future)
        future.number = next(made)

    return begin, lambda future: getattr(future, "number", 0)


def clock(real: Callable[[], float], begin_s: float = 0.0) -> Callable[[], float]:
    def now() -> float:
        turns = scheduler()
        return real() if turns is None else begin_s + turns.now_s

    return now


def sleep(seconds: float, *, real: Callable[[float], None] = time.sleep) -> None:
    turns = scheduler()
    if turns is None:
        real(seconds)
    else:
        turns.sleep(seconds)


def _owners() -> Iterator[Any]:
    """Modules, and what is in them, that may have made locks or queues when they were imported."""
    yield concurrent.futures.thread
    for module in [each for name, each in sys.modules.items() if name.startswith("statehold")]:
        yield module
        for each in vars(module).values():
            if isinstance(each, type):  # in Python 3.11 and older, such a property has a lock
                yield from [p for p in vars(each).values() if isinstance(p, cached_property)]
            elif type(each).__module__ == module.__name__ and hasattr(each, "__dict__"):
                yield each


@lru_cache(maxsize=1)
def _made_before(_modules: int) -> list[tuple[Any, str, Callable[[], Any]]]:
    """What the modules have that are imported by now, so many: owner, name, and what stands for it
    in a run."""
    found: list[tuple[Any, str, Callable[[], Any]]] = []
    rlock = type(threading.RLock())
    for owner in {id(each): each for each in _owners()}.values():
        for name, value in list(vars(owner).items()):
            if isinstance(value, LockType):
                found.append((owner, name, TurnLock))
            elif isinstance(value, rlock):
                found.append((owner, name, threading.RLock))
            elif value is _RealQueue:
                found.append((owner, name, lambda: TurnQueue))
    return found


@contextlib.contextmanager
def replaced(turns: Scheduler) -> Iterator[None]:
    """Tasks of this scheduler take turns at everything that they wait for."""
    monotonic = clock(time.monotonic)
    drawn = random.Random(turns.random.random())
    begin_future, number_of_future = _count_futures()
    names: list[tuple[Any, str, Any]] = [
        (threading, "Lock", TurnLock),
        (threading, "_allocate_lock", TurnLock),
        (threading, "_CRLock", None),  # the one in Python is made of the lock
        (threading, "_time", monotonic),
        (threading.Thread, "start", start),
        (threading.Thread, "join", join),
        (threading.Thread, "is_alive", is_alive),
        (queue, "SimpleQueue", TurnQueue),
        (concurrent.futures.thread, "set", InOrder),
        (Future, "__init__", begin_future),
        (Future, "__hash__", number_of_future),
        (concurrent.futures._base, "id", number_of_future),
        (time, "monotonic", monotonic),
        (time, "perf_counter", clock(time.perf_counter)),
        (time, "time", clock(time.time, EPOCH_S)),
        (time, "sleep", sleep),
        (secrets, "token_hex", lambda nbytes=32: drawn.randbytes(nbytes).hex()),
    ]
    found = _made_before(len(sys.modules))
    global _running
    with contextlib.ExitStack() as patches:
        for where, name, new in names:
            patches.enter_context(mock.patch.object(where, name, new, create=True))
        for where, name, make in found:
            patches.enter_context(mock.patch.object(where, name, make()))
        _running = turns
        try:
            yield
        finally:
            _running = None
            _tasks_of_threads.clear()
