"""What an agent does when its trainer has died: bring the newest step in memory to other levels.

With the trainer's own means: places, promotions and their limits, one level after the other, from
the nearest on, whatever their cadence. A level that fails does not keep the next one waiting; it is
tried again every `retry_s`, until `give_up_s` after the death; where nothing moves for so long,
all of it ends. A step that turns out to be damaged is passed over for the one before, if the level
lacks that too.

Invariants: nothing is touched without the locks of the run, and they go to whoever wants them. What
is copied is verified, and published by the level's own commit: whenever this ends, by whatever
means, a level has the step or not.
Not here: when it begins, and what makes it stop (process).
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from statehold import _core
from statehold.checkpoint.levels.opening import open_places
from statehold.checkpoint.levels.places import DirectoryPlace
from statehold.checkpoint.levels.promoting import Promoter
from statehold.checkpoint.telemetry.watch import Watch
from statehold.errors import (
    ClosedError,
    CorruptionError,
    RunBusyError,
    StateholdError,
    StepOrderError,
)

if TYPE_CHECKING:
    from statehold.checkpoint.agent.orders import Orders
    from statehold.checkpoint.levels.places import Place
    from statehold.checkpoint.levels.specs import Level
    from statehold.observe.background_log import BackgroundLog

__all__ = ["Persisting"]

Target = tuple["Level", "Place"]

# Whoever has the level has what is newer, or does this itself: to ask again is of no use.
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
        """Whether storage has not answered for as long as anything is tried."""
        return time.monotonic() - self._moved_s > self._orders.give_up_s

    def run(self) -> None:
        """Bring the newest step to every level that lacks it."""
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
        """End what is under way; returns when it has ended."""
        self._stopped.set()
        copying = self._copying
        if copying is not None:
            copying.close()

    def _lacking(self, targets: list[Target]) -> list[Target]:
        """Try each of the levels; those that are to be tried again."""
        return [target for target in targets if not self._bring(*target)]

    def _bring(self, level: Level, place: Place) -> bool:
        """Bring the newest step that is intact to a level; False: try again."""
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
                promoter.start(step, self._copies, self._source)
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
