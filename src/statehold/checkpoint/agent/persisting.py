"""The work of an agent after its trainer's death: copy the newest step in memory to other levels.

It uses the trainer's own means: places, promotions and their limits. It goes through the levels one
after the other, the nearest first, whatever their cadence. A failing level does not delay the next
one. It is tried again every `retry_s`, until `give_up_s` after the death. If nothing moves for that
long, the agent ends. If a step turns out to be damaged, the step before it is copied, unless the
level has that already.

Invariants: nothing is touched without the locks of the run, and another process that asks gets
them. Copies are verified, and published by the level's own commit. Whenever this ends, by whatever
means, a level has the step or not.
Not here: when it begins, and what makes it stop (process).
"""

from __future__ import annotations

import contextlib
import threading
import time

from statehold import _core
from statehold.checkpoint.agent.orders import Orders
from statehold.checkpoint.levels.opening import open_places
from statehold.checkpoint.levels.places import DirectoryPlace, Place
from statehold.checkpoint.levels.promoting import Promoter
from statehold.checkpoint.levels.specs import Level
from statehold.checkpoint.telemetry.watch import Watch
from statehold.errors import (
    ClosedError,
    CorruptionError,
    RunBusyError,
    StateholdError,
    StepOrderError,
)
from statehold.observe.background_log import BackgroundLog

Target = tuple["Level", "Place"]

# The process that holds the level has a newer step, or does this work itself, so asking again is of
# no use.
_FINAL = (ClosedError, CorruptionError, RunBusyError, StepOrderError)


class Persisting:
    """One agent's work; run() once, the rest from any thread."""

    def __init__(self, orders: Orders, log: BackgroundLog) -> None:
        self._orders = orders
        self._log = log
        self._watch = Watch(orders.run, log=log)
        self._fs = _core.open_fs(orders.backend, orders.queue_depth)
        places = open_places(
            orders.levels,
            orders.run,
            self._fs,
            orders.buffer_bytes,
            reuse=False,
            yields=True,
        )
        assert isinstance(places[0], DirectoryPlace)
        self._source = places[0]
        self._targets: list[Target] = list(zip(orders.levels[1:], places[1:], strict=True))
        self._near = [place for place in places if isinstance(place, DirectoryPlace)]
        self._stopped = threading.Event()
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
        self._source.prepare(None)
        until = time.monotonic() + self._orders.give_up_s
        targets = self._lacking(self._targets)
        while targets and not self._stopped.is_set():
            if time.monotonic() + self._orders.retry_s > until:
                self._lost += [place.name for _, place in targets]
                break
            self._stopped.wait(self._orders.retry_s)
            targets = self._lacking(targets)
        if self._lost:
            self._log.error("ended; the newest step did not reach: %s", ", ".join(self._lost))
        elif not self._stopped.is_set():
            self._log.info("done")

    def stop(self) -> None:
        """End the work under way; returns when it has ended."""
        self._stopped.set()
        copying = self._copying
        if copying is not None:
            copying.close()

    def _lacking(self, targets: list[Target]) -> list[Target]:
        """Try each of the levels; returns those to try again."""
        return [target for target in targets if not self._bring(*target)]

    def _bring(self, level: Level, place: Place) -> bool:
        """Copy the newest intact step to a level; False: try again."""
        if self._stopped.is_set():
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
        if isinstance(error, _FINAL) and not self._stopped.is_set():
            self._lost.append(place.name)
            return True
        return error is None

    def _go_on(self) -> None:
        """Before each block."""
        self._moved_s = time.monotonic()
        if self._stopped.is_set():
            raise ClosedError("the agent was stopped")
