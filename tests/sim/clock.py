"""A clock that jumps from event to event."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Events in the order of their times. end_s: the end of time."""

    def __init__(self, end_s: float) -> None:
        self.now = 0.0
        self._end_s = end_s
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def run(self, until: Callable[[], bool]) -> bool:
        """Whether `until` became true before the end of time."""
        while self._events and self.now < self._end_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if until():
                return True
        return until()
