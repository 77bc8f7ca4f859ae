"""Threads that run one at a time, in an order that a seed decides: the same seed, the same run.

    with Scheduler(seed) as scheduler:    the caller's thread is the first task
        ...                               every thread that a task starts is a task, too
    scheduler.digest                      of all that happened, in order

A task runs until it comes to a point of synchronisation: a lock, a condition, an event, a queue, a
join, a sleep, an operation on a simulated disk (turns, stepped). There the scheduler chooses who
goes on: a task that can, or the disk with one of the transfers that wait. What a task waits for is
a function (`ready`) that anybody may call, so nothing has to be woken.

Time is virtual. It advances when no task and no disk can go on, to the next deadline. So a deadline
costs no time, and passes only when nothing else can happen.

Invariants: only the task that was chosen runs Python. When tasks wait for ever and nothing else can
happen, the first task raises Deadlock, which shows the stack of every task. All tasks have ended
when the `with` block is left.
Not here: which calls are points of synchronisation.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
import sys
import traceback
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Iterator
from typing import Protocol

STEPS_MAX = 2_000_000  # a run that has more choices than these goes round in circles
TICK_S = 1e-5  # what a choice takes
DRAIN_S = 3600.0  # of virtual time: for what still ends by itself
# How often a task is chosen, compared with the others: some are left behind for long.
WEIGHTS = (1.0, 1.0, 1.0, 0.02)
# How often a task loses its turn at a point at which it could go on.
RESTLESS = (0.01, 0.05, 0.3)


class Deadlock(BaseException):
    """Nothing can happen any more, or too much has; no handler of the library catches it."""


class Unwound(BaseException):
    """Ends a task that would wait for ever; no handler of the library catches it."""


class Disk(Protocol):
    """Transfers that wait until they are chosen."""

    def waiting(self) -> list[str]: ...

    def complete(self, index: int) -> None: ...


class Task:
    """A thread. While it does not run, it waits for its baton."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.ident = 0
        self.is_over = False
        self.what = "begins"
        self.ready: Callable[[], bool] = _always
        self.until: float | None = None
        self.in_time = True  # whether the newest wait has ended before its deadline
        self.baton = allocate_lock()
        self.baton.acquire()


class Scheduler:
    """Runs the tasks. `trace`: what has happened; `now_s`: virtual seconds since the beginning."""

    def __init__(self, seed: object) -> None:
        self.now_s = 0.0
        self.trace: list[str] = []
        self.random = random.Random(f"schedule {seed}")
        self.disks: list[Disk] = []
        self._restless = self.random.choice(RESTLESS)
        self.disk_weight = self.random.choice(WEIGHTS)
        self._tasks: list[Task] = []
        self._by_thread: dict[int, Task] = {}
        self._count = 0
        self._first = self._add("main")
        self._steps = 0
        self._deadlock: Deadlock | None = None
        self._is_ending = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Scheduler]:
        """The caller's thread is a task until all others have ended."""
        gc.disable()  # a collection would come at a moment of its own
        gc.collect()  # what is garbage already is not of this run
        gc.freeze()  # what is alive already is not looked at again, here and later
        self._enter(self._first)
        try:
            yield self
            gc.collect()
            self.wait(self._is_alone, DRAIN_S, "the end of the other tasks")
        finally:
            self._end_all()
            self._leave(self._first)
            gc.enable()

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def current(self) -> Task | None:
        """The task of this thread; None for a foreign thread."""
        return self._by_thread.get(get_ident())

    def say(self, what: str) -> None:
        """Something has happened that every run of the seed must repeat."""
        task = self.current()
        self.trace.append(f"{self.now_s:.5f} {task.name if task else '-'}: {what}")

    # -- points of synchronisation ---------------------------------------------------------

    def pause(self, what: str, share: float = 1.0) -> None:
        """Another task may go on before this one. share: how often, where it would be too often."""
        if self.random.random() < self._restless * share and not self._is_ending:
            task = self.current()
            assert task is not None
            self._wait(task, _always, None, what)

    def wait(self, ready: Callable[[], bool], timeout_s: float | None, what: str) -> bool:
        """Return True once `ready()`, or False when the time is over.

        What `ready()` says changes only while a task or a disk goes on.
        """
        task = self.current()
        assert task is not None
        if self._is_ending and task is not self._first:
            if ready():
                return True
            raise Unwound
        until = None if timeout_s is None else self.now_s + max(timeout_s, 0.0)
        return self._wait(task, ready, until, what)

    def sleep(self, seconds: float) -> None:
        """Return when so much virtual time is over. Choices take time, too, so what could happen
        before may still wait for its turn."""
        self.wait(_never, seconds, f"{seconds} s to pass")

    def start(self, name: str) -> Task:
        """A new task, which can run from now on; its thread calls run()."""
        task = self._add(name)
        self.say(f"starts {task.name}")
        return task

    def run(self, task: Task, action: Callable[[], None]) -> None:
        """On the new thread: run the task to its end."""
        task.baton.acquire()
        self._enter(task)
        try:
            action()
        finally:
            task.is_over = True
            self._tasks.remove(task)
            self._leave(task)
            following = self._first if self._is_ending else self._choose()
            following.baton.release()

    # -- whose turn it is ------------------------------------------------------------------

    def _add(self, name: str) -> Task:
        task = Task(f"{self._count} {name}", self.random.choice(WEIGHTS))
        self._count += 1
        self._tasks.append(task)
        return task

    def _enter(self, task: Task) -> None:
        task.ident = get_ident()
        self._by_thread[task.ident] = task

    def _leave(self, task: Task) -> None:
        del self._by_thread[task.ident]

    def _wait(self, task: Task, ready: Callable[[], bool], until: float | None, what: str) -> bool:
        task.ready, task.until, task.what = ready, until, what
        self._hand_to(self._choose(), task)
        if self._deadlock is not None and task is self._first and not self._is_ending:
            raise self._deadlock
        if self._is_ending and task is not self._first:
            raise Unwound
        return task.in_time

    def _hand_to(self, chosen: Task, task: Task) -> None:
        if chosen is not task:
            chosen.baton.release()
            task.baton.acquire()

    def _choose(self) -> Task:
        """The task that goes on; until there is one, the disks go on and time passes."""
        while self._deadlock is None:
            self._steps += 1
            self.now_s += TICK_S
            transfers = [(d, i, what) for d in self.disks for i, what in enumerate(d.waiting())]
            able = [task for task in self._tasks if self._can(task)]
            if self._steps > STEPS_MAX or not (able or transfers or self._advance()):
                self._deadlock = Deadlock(self._report())
                break
            if not able and not transfers:
                continue
            weights = [task.weight for task in able] + [self.disk_weight] * len(transfers)
            (chosen,) = self.random.choices([*able, *transfers], weights)
            if isinstance(chosen, Task):
                self.trace.append(f"{self.now_s:.5f} {chosen.name} goes on: {chosen.what}")
                return chosen
            disk, index, what = chosen
            self.trace.append(f"{self.now_s:.5f} disk: {what}")
            disk.complete(index)
        return self._first

    def _can(self, task: Task) -> bool:
        task.in_time = task.ready()
        return task.in_time or (task.until is not None and task.until <= self.now_s)

    def _advance(self) -> bool:
        """To the next deadline; False where there is none."""
        untils = [task.until for task in self._tasks if task.until is not None]
        if untils:
            self.now_s = max(self.now_s, min(untils))
        return bool(untils)

    # -- the end ---------------------------------------------------------------------------

    def _is_alone(self) -> bool:
        return self._tasks == [self._first]

    def _end_all(self) -> None:
        """Tasks that wait raise Unwound there, one after the other."""
        self._is_ending = True
        while len(self._tasks) > 1:
            for disk in self.disks:  # engines that nobody closes wait for their transfers
                while disk.waiting():
                    disk.complete(0)
            self._hand_to(self._tasks[-1], self._first)

    def _report(self) -> str:
        frames = sys._current_frames()
        lines = [f"no task can go on at {self.now_s:.5f} s, after {self._steps} choices"]
        for task in self._tasks:
            if task.ident:
                lines.append(f"{task.name} waits for: {task.what}")
                stack = traceback.extract_stack(frames[task.ident])
                own = [frame for frame in stack if frame.filename != __file__]
                lines += traceback.format_list(own[-12:])
        return "\n".join(lines)


def _always() -> bool:
    return True


def _never() -> bool:
    return False
