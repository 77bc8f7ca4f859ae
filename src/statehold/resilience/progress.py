"""Whether the training thread is stuck in a microbatch.

A rank waits for others as long as they need. But if a microbatch takes much longer than all before,
a device or a data set hangs, and the rank must not beat any more (R5). The first microbatch has
nothing to be compared with: it compiles, allocates and reads cold data (R13).

Invariants: waiting, and the user's code between steps, count as progress. A microbatch that was not
computed to its end is no measure for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STUCK_LEAST_S = 60.0
STUCK_FACTOR = 10
STUCK_FIRST_S = 3600.0


class StuckCheck:
    """stuck_s: a microbatch that takes longer is stuck. None: ten times the longest one, and at
    least 60 s; an hour for the first one.

    passed_s: the limit that the microbatch in progress, or the last one, has passed.
    """

    def __init__(self, stuck_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.passed_s: float | None = None
        self._stuck_s = stuck_s
        self._clock = clock
        self._longest: float | None = None
        self._since: float | None = None

    def begin(self) -> None:
        self.passed_s = None
        self._since = self._clock()

    def end(self, *, is_computed: bool) -> None:
        if self._since is not None and is_computed:
            self._longest = max(self._longest or 0.0, self._clock() - self._since)
        self._since = None

    def is_stuck(self) -> bool:
        since = self._since
        if since is None or self._clock() - since <= self.limit_s:
            return False
        self.passed_s = self.limit_s
        return True

    @property
    def limit_s(self) -> float:
        """Of a microbatch."""
        if self._stuck_s is not None:
            return self._stuck_s
        if self._longest is None:
            return STUCK_FIRST_S
        return max(STUCK_LEAST_S, STUCK_FACTOR * self._longest)
