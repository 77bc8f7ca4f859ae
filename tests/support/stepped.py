"""Ranks, engines and simulated disks that take turns, by a Scheduler.

    with simulated(seed) as turns: ...

The threads of the engine are native, and no scheduler sees them. They work while a task has called
the engine, or the disk has completed a transfer, and the call returns only when none of them finds
anything more to do (Engine.settle). So what they do is part of that turn. With one copy thread for
each engine its order is that of the engine's queues. Another thread makes the buffers, all of them
before the first job: the order would depend on when a buffer comes. The disk holds every transfer
until the scheduler chooses it (SimFs.hold).

A wait for a job is a wait of the task: the scheduler asks the job, which never blocks. What would
wait for transfers inside native code is called when there are none: nobody else could complete them
meanwhile.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from statehold import _core
from statehold.checkpoint.save import pipeline, shared, writes
from support.in_memory import SimFs
from support.scheduler import Scheduler
from support.turns import replaced

_WAITS = ("wait", "wait_eager", "wait_copied", "wait_compared", "wait_written")
_STIRS = ("attach", "filled", "filled_all", "release", "release_all", "cancel")


@contextlib.contextmanager
def simulated(seed: object) -> Iterator[Scheduler]:
    """What is done inside is done in the same order each time."""
    turns = Scheduler(seed)

    def give_back(file: Any) -> None:
        turns.wait(lambda: not _is_moving(turns, file.path), None, f"transfers of {file.path}")
        writes.give_back(file)

    engines = mock.patch.object(_core, "Engine", engines_in_turns(turns))
    with contextlib.ExitStack() as stack:
        for module in (pipeline, shared):
            stack.enter_context(mock.patch.object(module, "give_back", give_back))
        for each in (replaced(turns), engines, turns.running()):
            stack.enter_context(each)
        yield turns


def _is_moving(turns: Scheduler, path: str) -> bool:
    """Whether a transfer of the file waits for its turn."""
    return any(f" {path} " in what for disk in turns.disks for what in disk.waiting())


class SteppedDisk:
    """A disk and the engines on it."""

    def __init__(self, fs: SimFs) -> None:
        self.fs = fs
        self.engines: list[weakref.ref[SteppedEngine]] = []
        fs.hold()

    def waiting(self) -> list[str]:
        return self.fs.waiting

    def complete(self, index: int) -> None:
        self.fs.complete(index)
        for each in self.engines:
            engine = each()
            if engine is not None:
                engine.settle()


class SteppedEngine:
    """Stands before an engine."""

    def __init__(self, turns: Scheduler, engine: Any, clients: int) -> None:
        self.turns = turns
        self.settle: Callable[[], None] = engine.settle
        self._engine = engine
        self._clients = clients
        self._jobs: weakref.WeakValueDictionary[int, SteppedJob] = weakref.WeakValueDictionary()
        self._count = 0

    def write(self, **request: Any) -> SteppedJob:
        return self._began(self._engine.write(**request))

    def read(self, **request: Any) -> SteppedJob:
        return self._began(self._engine.read(**request))

    def ranges(self, **request: Any) -> SteppedJob:
        return self._began(self._engine.ranges(**request))

    def close(self) -> None:
        for job in list(self._jobs.values()):
            job.cancel()
        self.turns.wait(self._has_all_buffers, None, "the last transfers of an engine")
        self._engine.close()

    def _has_all_buffers(self) -> bool:
        """Each transfer has one."""
        stats = map(self._engine.client_stats, range(self._clients))
        return not any(each["buffers"] for each in stats)

    def _began(self, native: Any) -> SteppedJob:
        job = SteppedJob(self, native)
        self._count += 1
        self._jobs[self._count] = job
        self.settle()
        return job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class SteppedJob:
    """Stands before a job of an engine."""

    def __init__(self, engine: SteppedEngine, job: Any) -> None:
        self._engine = engine
        self._job = job

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._job, name)
        if name in _WAITS:
            return lambda timeout: self._wait(name, lambda: value(0) or None, timeout) or False
        if name in _STIRS:
            return lambda *args, **options: self._then_settle(value, *args, **options)
        return value

    def next_fill(self, timeout: float | None) -> Any:
        return self._next("fill", timeout)

    def next_ready(self, timeout: float | None) -> Any:
        return self._next("ready", timeout)

    def next_fills(self, timeout: float | None, most: int) -> Any:
        fill = self.next_fill(timeout)
        return [] if fill is None else [fill]

    def next_readies(self, timeout: float | None, most: int) -> Any:
        ready = self.next_ready(timeout)
        return [] if ready is None else [ready]

    def _next(self, what: str, timeout: float | None) -> Any:
        take = getattr(self._job, f"next_{what}")
        left = "fills_left" if what == "fill" else "ready_left"

        def poll() -> Any:
            found = take(0)
            return (found,) if found is not None or getattr(self._job, left) == 0 else None

        answer = self._wait(f"next_{what}", poll, timeout)
        return answer[0] if answer else None

    def _wait(self, name: str, poll: Callable[[], Any], timeout: float | None) -> Any:
        """What poll() gives once that is not None; None when the time is over."""
        answers: list[Any] = []

        def ready() -> bool:
            if not answers:
                try:
                    answers.append(poll())
                except Exception as error:
                    answers.append(error)
                if answers[0] is None:
                    answers.clear()
            return bool(answers)

        if not self._engine.turns.wait(ready, timeout, f"{name} of a job"):
            return None
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def _then_settle(self, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        finally:
            self._engine.settle()

    def __del__(self) -> None:
        self.cancel()


def engines_in_turns(turns: Scheduler) -> Callable[..., Any]:
    """What stands before _core.Engine while the scheduler runs."""
    real = _core.Engine

    def make(fs: Any, *args: Any, **options: Any) -> Any:
        engine = real(fs, *args, **options)
        disk = disk_of(turns, fs)
        stepped = SteppedEngine(turns, engine, len(options.get("clients", [None])))
        disk.engines.append(weakref.ref(stepped))
        engine.settle(all_buffers=True)
        return stepped

    return make


def disk_of(turns: Scheduler, fs: SimFs) -> SteppedDisk:
    for disk in turns.disks:
        assert isinstance(disk, SteppedDisk)
        if disk.fs is fs:
            return disk
    turns.disks.append(SteppedDisk(fs))
    return turns.disks[-1]  # type: ignore[return-value]
