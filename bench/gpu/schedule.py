"""What a save of device tensors would take on a device whose costs are known, in virtual time.

    python -m bench.gpu.schedule

The relay of the product runs here as it is: it takes buffers, enqueues copies and gives buffers
back. The engine, the copy engine of the device and the disk are stood for by their measured rates,
and a clock that only they advance. So the same costs give the same figures on every machine.
Costs: H200, 2c8b861 (results/2026-11-26-h200). Two of them were not measured alone. The rate of a
copy thread that hashes follows from "staged", and the time of a change of the interpreter lock's
holder from the launch-bound steps.
Invariants: a buffer is lent, filled, hashed, written and free again, in this order.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from statehold.tensors.devices.mover import PATIENCE_MAX_S, PATIENCE_S
from statehold.tensors.devices.relay import AT_ONCE, relay

__all__ = ["BEFORE", "NOW", "Costs", "Plan", "Saved", "saved"]

GB = 1e9
BUFFER = 16 << 20


@dataclass(frozen=True)
class Costs:
    """Rates in bytes a second, times in seconds."""

    d2h: float = 54.74 * GB
    disk: float = 3.332 * GB
    hashing: float = 4.8 * GB  # of one copy thread
    threads: int = 4
    lend: float = 5e-6  # of a copy thread, for a buffer that it does not fill
    lock: float = 180e-6  # what a launch-bound program loses when another thread takes its lock


@dataclass(frozen=True)
class Plan:
    """How the product goes about it. lends_first: before what is filled is hashed. staged_hashed:
    "staged" waits for checksums. calls: of torch or the engine, for each buffer and each batch."""

    at_once: int = AT_ONCE
    lends_first: bool = True
    staged_hashed: bool = False
    calls_each: float = 0
    calls_batch: float = 5
    call_s: float = 6e-6  # of processor time
    each_s: float = 20e-6  # the same, for what Python does with the pieces of a buffer


NOW = Plan()
BEFORE = Plan(
    at_once=1, lends_first=False, staged_hashed=True, calls_each=10, calls_batch=0
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
    waits_since: float | None = None  # relay() notes it for the end of a Checkpointer

    def __post_init__(self) -> None:
        self.workers = [0.0] * self.costs.threads

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
        calls = self.plan.calls_batch + self.plan.calls_each * len(lent)
        self.takes += int(calls)
        self.advance(self.now + calls * self.plan.call_s + len(lent) * self.plan.each_s)
        start = max(self.device_free, self.now)
        self.device_free = start + len(lent) * BUFFER / self.costs.d2h
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


def main() -> None:
    whole = 12e9
    print(f"{'':34}{'2c8b861':>10}{'measured':>10}{'now':>10}")
    kept = [saved(whole, whole * 1.01, plan=plan) for plan in (BEFORE, NOW)]
    small = [saved(whole, 1 << 30, plan=plan) for plan in (BEFORE, NOW)]
    few = [saved(4e9, 4.1e9, plan=plan) for plan in (BEFORE, NOW)]
    lock = replace(Costs()).lock
    rows = [
        ("staged, GB/s", "19.1", [whole / each.staged / GB for each in kept]),
        ("gate, 0.5 s after save(), ms", "123", [each.gate(0.5) * 1e3 for each in kept]),
        ("gate, update at once, ms", "408", [each.gate(0) * 1e3 for each in kept]),
        ("written, GB/s", "2.53", [whole / each.written / GB for each in kept]),
        ("staged, GB/s, staging of 1 GiB", "", [whole / each.staged / GB for each in small]),
        ("takes of the lock, 4 GB", "", [float(each.takes) for each in few]),
        ("launch-bound step / plain", "1.53", [1 + each.takes * lock for each in few]),
    ]
    for name, measured, values in rows:
        print(f"{name:34}{values[0]:10.4g}{measured:>10}{values[1]:10.4g}")


if __name__ == "__main__":
    main()
