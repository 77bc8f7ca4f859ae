"""Progress: whether the training thread is stuck in a microbatch.

A rank waits for others as long as they need. But if a microbatch takes much longer than all before,
a device or a data set hangs, and the rank must not beat any more (R5).

Invariants: waiting, and the user's code between steps, count as progress.
"""

from __future__ import annotations

import time

STUCK_LEAST_S = 60.0
STUCK_FACTOR = 10


class Progress:
    """stuck_s: a microbatch that takes longer is stuck. None: ten times the longest one, and at
    least 60 s."""

    def __init__(self, stuck_s: float | None) -> None:
        self._stuck_s = stuck_s
        self._longest = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        if self._since is not None:
            self._longest = max(self._longest, time.monotonic() - self._since)
        self._since = None

    def is_stuck(self) -> bool:
        since = self._since
        if since is None:
            return False
        limit = self._stuck_s or max(STUCK_LEAST_S, STUCK_FACTOR * self._longest)
        return time.monotonic() - since > limit
