"""Threads that make calls, and whose callers may be interrupted anywhere.

    Worker    one thread, and its calls in order
    Crew      several threads, and a Task for each call, which waits for its end
    Flag      what one thread sets and others wait for
    Thread    what others wait for the end of
    apart     one call, on a thread that ends with it

An exception from a signal's handler can come between two instructions of a caller. An executor
takes a threading.Condition in submit(), and a threading.Event in wait() and set(): the lock stays
taken then, and other threads wait for ever.
A SimpleQueue is written in C: a handler runs before or after put(), never inside it. The same holds
for `with` and a Lock.

Invariants: the interpreter makes the calls that are waiting before it ends. A worker that nobody
holds any longer makes them, too, and ends. Nobody waits for a worker that was left, whose call may
never return: so its thread is a daemon.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from statehold.process.warn import let_go

T = TypeVar("T")

Action = Callable[[], object]
_Actions = queue.SimpleQueue[Action | None]
Woken = queue.SimpleQueue[None]
COPYING = 5  # the niceness of the engine's threads that copy


class Flag:
    """A threading.Event that a signal's handler may set, and whose waiters may be interrupted."""

    def __init__(self) -> None:
        self.is_set = False
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # one at least once it is set

    def set(self) -> None:
        """From any thread, and any number of times."""
        try:
            self.is_set = True
        finally:
            self._tokens.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, after at most `timeout` seconds (None: no limit)."""
        if not self.is_set:
            try:
                self._tokens.get(timeout=None if timeout is None else max(0.0, timeout))
            except queue.Empty:
                pass
            finally:
                if self.is_set:
                    self._tokens.put(None)
        return self.is_set


class Thread(threading.Thread):
    """A thread whose end can be waited for again after Ctrl-C. After an interrupted join(), that of
    threading takes a thread that runs for one that has ended (CPython 3.10 to 3.12)."""

    def __init__(
        self, call: Callable[..., Any], name: str, *args: Any, daemon: bool = True
    ) -> None:
        super().__init__(None, call, name, args, daemon=daemon)
        self._over, self._pid = Flag(), os.getpid()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def is_alive(self) -> bool:
        return self.ident is not None and not self._over.is_set and self._pid == os.getpid()

    def join(self, timeout: float | None = None) -> None:
        if self is threading.current_thread() or not self.is_alive() or self._over.wait(timeout):
            super().join(timeout)


class _Threads:
    """They start now: no thread can start while a program ends. Raises RuntimeError.

    begin: what each calls first. It must not fail.
    """

    def __init__(self, name: str, count: int = 1, begin: Action = int) -> None:
        self._actions: _Actions = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [_started(f"{name}_{n}", self._actions, begin) for n in range(count)]

    def __del__(self) -> None:
        self._actions.put(None)

    def close(self) -> None:
        """Return once all calls are made and the threads have ended, or are left."""
        self._is_closed = True
        for thread in self._threads:
            _end(thread, self._actions)


class Worker(_Threads):
    """One thread."""

    def submit(self, action: Action) -> None:
        """Make the call after those that were submitted before. Raises RuntimeError after close."""
        if self._is_closed:
            raise RuntimeError(f"the thread {self._threads[0].name} has ended")
        self._actions.put(action)

    def passed(self, until: float | None) -> bool:
        """Whether all calls so far are made. Waits, at most until then on the monotonic clock, and
        not for a worker that was left, or has ended with the program."""
        if self._threads[0] not in _awaited or not self._threads[0].is_alive():
            return True
        latch = threading.Lock()  # of this call alone: nobody waits for it if it stays taken
        latch.acquire()
        self.submit(latch.release)
        return latch.acquire(timeout=-1.0 if until is None else max(0.0, until - time.monotonic()))

    def leave(self) -> None:
        """Have nobody wait for the thread any more, not even the end of the program."""
        self._is_closed = True
        _awaited.pop(self._threads[0], None)


class Task(Generic[T]):
    """A call that a pool makes. woken: gets an item when it has ended."""

    def __init__(self, call: Callable[[], T], woken: Woken | None = None) -> None:
        self._call: Callable[[], T] | None = call
        self._woken = woken
        self._value: T
        self._error: BaseException | None = None
        self.has_ended = False
        self._running = threading.Lock()
        self._running.acquire()

    def make(self) -> None:
        """Make the call, once."""
        try:
            self._value = self._call()  # type: ignore[misc]
        except BaseException as error:
            self._error = error
        self._call = None  # it may keep the state alive
        self.has_ended = True
        self._running.release()
        if self._woken is not None:
            self._woken.put(None)

    def error(self) -> BaseException | None:
        """What the call has raised. Waits for its end."""
        with self._running:
            return self._error

    def result(self) -> T:
        """What the call has returned. Waits for its end, and raises what the call has raised."""
        error = self.error()
        if error is not None:
            raise error
        return self._value


class Crew(_Threads):
    """Threads that share their calls."""

    def submit(self, call: Callable[..., T], *args: Any, woken: Woken | None = None) -> Task[T]:
        """Make the call on the first thread that is free."""
        task = Task[T](partial(call, *args), woken)
        self._actions.put(task.make)
        return task


def yield_processor(niceness: int = COPYING) -> None:
    """Give this thread, and those that it starts, only the processor time that others leave."""
    with contextlib.suppress(OSError):  # a thread is a process to Linux; elsewhere nothing changes
        thread = threading.get_native_id()
        niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def apart(call: Callable[..., T], *args: Any) -> T:
    """What a call returns that changes state of its thread, or of the process, for a while.

    A signal's handler runs on the main thread only. There it may come before such a change is
    undone: inside the `__enter__` of a context, or on the way into its `__exit__`. Here it never
    comes. A caller that is interrupted waits for the end of the call.
    """
    crew = Crew("statehold-torch")
    try:
        return crew.submit(call, *args).result()
    finally:
        crew.close()


# By thread: the queue of each that was not left. A thread that runs keeps itself in here.
_awaited: weakref.WeakKeyDictionary[threading.Thread, _Actions] = weakref.WeakKeyDictionary()
# How often a wait for a thread looks whether the thread was left meanwhile.
_LOOK_S = 1.0


def _started(name: str, actions: _Actions, begin: Action = int) -> threading.Thread:
    """The thread does not hold what owns it, and ends if that is dropped."""
    thread = Thread(_work, name, actions, begin)
    thread.start()
    _awaited[thread] = actions
    return thread


def _work(actions: _Actions, begin: Action) -> None:
    begin()
    while (action := actions.get()) is not None:
        try:
            action()
        except BaseException as error:
            let_go(error)
        del action  # it may keep the state alive
    actions.put(None)  # other threads may take their calls from here


def _end(thread: threading.Thread, actions: _Actions) -> None:
    actions.put(None)
    while thread in _awaited and thread.is_alive():
        thread.join(_LOOK_S)


def _end_all() -> None:
    """What was made last ends first: its calls may need threads that were there before it."""
    for thread, actions in reversed(list(_awaited.items())):
        _end(thread, actions)


# Before the interpreter waits for its threads; after process/ending, which registers later.
getattr(threading, "_register_atexit", lambda _: None)(_end_all)
