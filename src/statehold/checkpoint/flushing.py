"""Flushing: copy the newest step to every level, on all ranks, within one deadline.

    wait for saves and copies under way -> look where files are, on several hosts
    -> a round: rank 0 says which levels lack the step -> copy, wait

Invariants: with a deadline, no rank stays longer, even if others never come. The rounds of a flush
have numbers of their own, so a rank that has missed a flush disturbs no later one.
Not here: a copy (levels/promoting). The last save of a process that leaves goes to all levels with
its own commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from statehold.checkpoint.levels.levels import Levels
from statehold.ranks.rounds import Round, together

# The share of the time that is reserved for reporting a failed wait to the other ranks.
MEETING_SHARE = 0.2
MEETING_S_MAX = 10.0


class Countdown:
    """How many of so many seconds are left; None if there is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds

    def __call__(self, less_s: float = 0.0) -> float | None:
        if self._until is None:
            return None
        return max(0.0, self._until - less_s - time.monotonic())


def flush(
    levels: Levels,
    wait_idle: Callable[[float | None], None],
    number: int,
    timeout_s: float | None,
    meet_s: float | None = None,
) -> None:
    """Copy the newest step to all levels. All ranks, with the same `number`, new each time.

    meet_s: how long to wait for ranks that may not come; None: as long as usual. A rank that leaves
        after the first round is missing in the next ones.
    """
    peers, left = levels.peers, Countdown(timeout_s)
    if meet_s is not None:
        wait_idle(left())  # ends on all ranks at about the same time
    kept_s = min(MEETING_SHARE * (timeout_s or 0.0), MEETING_S_MAX) if peers else 0.0
    numbered = 3 * number
    together(peers, lambda: wait_idle(left(kept_s)), Round("flush", numbered, meet_s or left()))
    levels.look(Round("flush", numbered + 1, meet_s or left()))
    levels.promotions.catch_up(Round("flush", numbered + 2, meet_s or left()))
    levels.promotions.wait(left())
