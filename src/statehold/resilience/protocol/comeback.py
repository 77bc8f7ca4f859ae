"""Comeback: how long a replica that is out of the job waits before it joins again (R10). Pure.

A replica that was out once joins at once. If it is soon out again, it may be unable to reach some
member: each time it joins, the others lose the time of FRUITLESS_MAX epochs. So it waits longer and
longer, until it stays.

Invariants: a replica waits PAUSE_MAX_S at most. If it has stayed for STAYS_S, it joins at once.
"""

from __future__ import annotations

PAUSE_S = 1.0
PAUSE_MAX_S = 60.0
STAYS_S = 600.0


class Comeback:
    """One process: it may be out several times."""

    def __init__(self) -> None:
        self._joined: float | None = None  # again, in seconds of any clock
        self._pause_s = 0.0

    def pause(self, now: float) -> float:
        """It is out. Returns how many seconds it has to wait."""
        if self._joined is None or now - self._joined > STAYS_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s or PAUSE_S)
        self._joined = now + self._pause_s
        return self._pause_s
