"""What a save or restore of device tensors would take where costs are known, in virtual time.

    python -m bench.gpu.schedule [--out DIR]     of each target, in the table of bench.gpu

The relay of the product runs here as it is: it takes buffers, enqueues copies and gives buffers
back. The engine, the copy engine of the device and the disk are stood for by their measured rates,
and a clock that only they advance. So the same costs give the same figures on every machine.
Costs: H200, 2c8b861 (results/2026-11-26-h200). Two of them were not measured alone. The rate of a
copy thread that hashes follows from "staged", and the time of a change of the interpreter lock's
holder from the launch-bound steps. A restore out of the page cache is taken to be as fast as a copy
thread hashes. A copy by the engine costs less than the 7 us of one by torch, which stand for it.
Invariants: a buffer is lent, filled, hashed, written and free again, in this order.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.gpu import figures
from bench.gpu.figures import Figure
from bench.gpu.report import Report
from statehold.tensors.devices.mover import PATIENCE_MAX_S, PATIENCE_S
from statehold.tensors.devices.pinning import PAUSE_S
from statehold.tensors.devices.relay import AT_ONCE, relay

__all__ = ["BEFORE", "NOW", "Costs", "Plan", "Saved", "predicted", "restored", "saved"]

GB = 1e9
BUFFER = 16 << 20


@dataclass(frozen=True)
class Costs:
    """Rates in bytes a second, times in seconds."""

    d2h: float = 54.74 * GB
    disk: float = 3.332 * GB
    h2d: float = 54.86 * GB
    hashing: float = 4.8 * GB  # of one copy thread
    pinning: float = GB / 0.2
    copy: float = 7.144e-6  # the launch of one
    lend: float = 5e-6  # of a copy thread, for a buffer that it does not fill
    lock: float = 180e-6  # what a launch-bound program loses when another thread takes its lock


@dataclass(frozen=True)
class Plan:
    """How the product goes about it. lends_first: before what is filled is hashed. staged_hashed:
    "staged" waits for checksums. calls: of torch or the engine, for each buffer and each batch.
    copies: in a buffer, one for each part of a tensor. pins: each buffer when it is first used.
    threads: those that copy and hash, of 16 processors."""

    at_once: int = AT_ONCE
    threads: int = 8
    copies: int = 2  # of 800 tensors
    pins: bool = False
    lends_first: bool = True
    staged_hashed: bool = False
    calls_each: float = 0
    calls_batch: float = 5
    call_s: float = 6e-6  # of processor time
    each_s: float = 20e-6  # the same, for what Python does with the pieces of a buffer


NOW = Plan()
BEFORE = Plan(
    at_once=1,
    threads=4,
    copies=0,
    lends_first=False,
    staged_hashed=True,
    calls_each=10,
    calls_batch=0,
)  # 2c8b861


@dataclass
class Saved:
    """Seconds after save(), and how often the stage thread took the interpreter lock."""

    enqueued: float
    staged: float
    written: float
    takes: int

    def gate(self, step: float) -> float:
        """What an update waits on the host that comes so many seconds after save()."""
        return max(0.0, min(self.enqueued, self.staged) - step)


@dataclass
class _World:
    """The engine, the device and the disk. Everything up to `now` has happened."""

    costs: Costs
    plan: Plan
    unlent: int
    buffers: int
    now: float = 0.0
    takes: int = 0
    device_free: float = 0.0
    disk_free: float = 0.0
    hashed: float = 0.0
    offered: deque[float] = field(default_factory=deque)
    to_hash: deque[float] = field(default_factory=deque)
    returning: list[float] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)
    unpinned: int = 0
    waits_since: float | None = None  # relay() notes it for the end of a Checkpointer

    def __post_init__(self) -> None:
        self.workers = [0.0] * self.plan.threads
        self.unpinned = self.buffers if self.plan.pins else 0

    def advance(self, to: float) -> None:
        """Let the copy threads work until then."""
        while self.workers[0] <= to:
            at = heapq.heappop(self.workers)
            heapq.heappush(self.workers, self._work(at, to))
        self.now = max(self.now, to)

    def _work(self, at: float, to: float) -> float:
        """What a copy thread does that is free at `at`: until when."""
        while self.returning and self.returning[0] <= at:
            heapq.heappop(self.returning)
            self.buffers += 1
        may_lend = self.unlent > 0 and self.buffers > 0
        may_hash = bool(self.to_hash) and self.to_hash[0] <= at
        if may_lend and (self.plan.lends_first or not may_hash):
            self.unlent -= 1
            self.buffers -= 1
            self.offered.append(at + self.costs.lend)
            return at + self.costs.lend
        if may_hash:
            self.to_hash.popleft()
            until = at + BUFFER / self.costs.hashing
            self.hashed = max(self.hashed, until)
            self.disk_free = max(self.disk_free, until) + BUFFER / self.costs.disk
            heapq.heappush(self.returning, self.disk_free)
            return until
        soon = [each for each in (*self.returning[:1], *list(self.to_hash)[:1]) if each > at]
        return min([*soon, math.nextafter(max(to, at), math.inf)])

    @property
    def rate(self) -> float:
        return self.costs.d2h

    # -- what relay() asks for ---------------------------------------------------------------

    def take(self, timeout: float | None, most: int) -> Sequence[int]:
        self.takes += 1
        end = math.inf if timeout is None else self.now + timeout
        self.advance(self.now)
        while not self.offered and self.unlent and self.now < end:
            self.advance(min(end, self.now + 20e-6))
        ready = [each for each in self.offered if each <= self.now]
        if not ready and self.offered:
            self.advance(self.offered[0])
        lent = range(min(len(self.offered), most, self.plan.at_once))
        for _ in lent:
            self.offered.popleft()
        return lent

    def move(self, lent: Sequence[int]) -> list[Any]:
        plan, new = self.plan, min(self.unpinned, len(lent))
        self.unpinned -= new
        calls = plan.calls_batch + plan.calls_each * len(lent) + new
        self.takes += int(calls)
        took_s = calls * plan.call_s + len(lent) * (plan.each_s + plan.copies * self.costs.copy)
        self.advance(self.now + took_s + new * (BUFFER / self.costs.pinning + PAUSE_S))
        start = max(self.device_free, self.now)
        self.device_free = start + len(lent) * BUFFER / self.rate
        return [self.device_free]

    def give_back(self, lent: Sequence[int]) -> None:
        self.takes += 1
        self.to_hash.extend([self.now] * len(lent))

    def is_complete(self, event: float) -> bool:
        return event <= self.now

    def wait_for(self, event: float) -> None:
        """As Mover.wait_for() on the stage thread."""
        patience = PATIENCE_S
        while not self.is_complete(event):
            self.takes += 1
            self.advance(self.now + patience)
            patience = min(2 * patience, PATIENCE_MAX_S)
        self.takes += 1

    @contextmanager
    def using(self) -> Iterator[None]:
        yield

    finishing = using

    @property
    def backend(self) -> _World:
        return self


class _Restoring(_World):
    """The same for a restore of files that are in the page cache."""

    @property
    def rate(self) -> float:
        return self.costs.h2d

    def _work(self, at: float, to: float) -> float:
        if self.unlent and self.buffers:
            self.unlent -= 1
            self.buffers -= 1
            until = at + BUFFER / self.costs.hashing
            self.offered.append(until)
            return until
        return math.nextafter(max(to, at), math.inf)

    def give_back(self, lent: Sequence[int]) -> None:
        self.takes += 1
        self.buffers += len(lent)


def saved(nbytes: float, staging: float, costs: Costs = Costs(), plan: Plan = NOW) -> Saved:
    """A save of a state that is all on the device, with so much staging memory."""
    blocks = math.ceil(nbytes / BUFFER)
    world = _World(costs, plan, blocks, max(2, int(staging / BUFFER)))
    left, enqueued = blocks, 0.0

    def move(lent: Sequence[int]) -> list[Any]:
        nonlocal left, enqueued
        events = world.move(lent)
        left -= len(lent)
        enqueued = world.now
        return events

    mover: Any = world
    relay(mover, mover.take, move, mover.give_back, lambda: left)
    staged = world.now
    while world.to_hash:
        world.advance(world.now + 1e-3)
    if plan.staged_hashed:
        staged = max(staged, world.hashed)
    return Saved(enqueued, staged, world.disk_free, world.takes)


def restored(nbytes: float, staging: float, costs: Costs = Costs(), plan: Plan = NOW) -> float:
    """Seconds of a restore whose files are in the page cache."""
    blocks = math.ceil(nbytes / BUFFER)
    world = _Restoring(costs, plan, blocks, max(2, int(staging / BUFFER)))
    left = blocks

    def move(lent: Sequence[int]) -> list[Any]:
        nonlocal left
        left -= len(lent)
        return world.move(lent)

    mover: Any = world
    relay(mover, mover.take, move, mover.give_back, lambda: left)
    return world.now


WHOLE, STEPS = 12 * GB, 4 * GB  # bytes of the states
FEW, MANY = NOW, replace(NOW, copies=28)  # 800 tensors, and 20,000


def predicted(plan: Plan = NOW) -> dict[str, list[Figure]]:
    """A figure for each target, by check."""
    costs, first = Costs(), replace(plan, pins=True)
    found = {
        "save-few": _of_save(plan, costs),
        "save-many": _of_save(replace(plan, copies=MANY.copies), costs),
        "first save": [],
        "steps": [],
        "restore": [],
    }
    begun = saved(WHOLE, 1.01 * WHOLE, costs, first)
    pause_ms = BUFFER / costs.pinning * 1e3
    found["first save"] = [
        figures.measured("staged", WHOLE / begun.staged / GB, "GB/s"),
        figures.at_most("gate, update at once", begun.gate(0) * 1e3, _at_once_ms(costs), "ms"),
        figures.at_most("pinned on its way", WHOLE / GB, 0, "GB"),
        figures.at_most("longest pause from pinning", pause_ms, 20, "ms"),
    ]
    bound = saved(STEPS, 1.02 * STEPS, costs, plan)
    ratio = 1 + bound.takes * costs.lock  # of steps of one second
    found["steps"] = [figures.at_most("launch-bound steps: saving / plain", ratio, 1.05)]
    took = restored(WHOLE, 1 << 30, costs, first)
    found["restore"] = [figures.at_least("restore, warm / H2D", WHOLE / took / costs.h2d, 0.5)]
    return found


def _at_once_ms(costs: Costs) -> float:
    return WHOLE / costs.d2h * 1e3 + 10


def _of_save(plan: Plan, costs: Costs) -> list[Figure]:
    found = saved(WHOLE, 1.01 * WHOLE, costs, plan)
    return [
        figures.at_least("staged / D2H", WHOLE / found.staged / costs.d2h, 0.9),
        figures.at_most("gate, after a step of 1 s", found.gate(1) * 1e3, 1, "ms"),
        figures.at_most("gate, update at once", found.gate(0) * 1e3, _at_once_ms(costs), "ms"),
        figures.at_least("committed / disk", WHOLE / found.written / costs.disk, 0.95),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.schedule")
    parser.add_argument("--out", type=Path, help="for gpu.md and gpu.json (default: the screen)")
    out = parser.parse_args().out
    found = predicted()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        facts = {"command": "python -m bench.gpu.schedule", "costs": str(Costs()), "plan": str(NOW)}
        report = Report(out, facts, list(found), "What a model predicts")
        for name, each in found.items():
            report.add(name, each, 0.0)
    for name, each in found.items():
        for figure in each:
            value = f"{figure.value:.4g} {figure.unit}"
            print(f"{name:12}{figure.name:40}{value:14}{figure.expected:16}{figure.verdict}")


if __name__ == "__main__":
    main()
