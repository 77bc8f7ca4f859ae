"""Which steps go to a level: each n-th, or one in so much time.

Pure: the time comes in. A step is due once a multiple of n steps, or that much time, has passed
since the last step that went there. What was due and could not be done stays due. A step that is
saved again replaces what was copied of it before, whatever the cadence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from statehold.errors import UsageError

__all__ = ["Cadence", "Every", "parse_every"]

_TIME = re.compile(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*(s|min|h)\s*", re.ASCII)
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Every:
    """So many steps, or so many seconds; exactly one of them is set."""

    steps: int | None = None
    seconds: float | None = None


def parse_every(value: int | str) -> Every:
    """10 -> each tenth step; "90s", "30min", "2h" -> time. Raises UsageError."""
    if type(value) is int and value >= 1:
        return Every(steps=value)
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match and float(match[1]) > 0:
        return Every(seconds=float(match[1]) * _SECONDS[match[2]])
    raise UsageError(
        "not a cadence",
        facts={"expected": 'a number of steps, at least 1, or a time: "90s", "30min", "2h"',
               "got": repr(value)[:80]},
    )  # fmt: skip


class Cadence:
    """When a level wants its next step. Not thread-safe.

    last_step, now_s: the newest step that the level has, and the time at which this began.
    """

    def __init__(self, every: Every, last_step: int | None, now_s: float) -> None:
        self._every = every
        self._last_step = last_step
        self._last_s = now_s

    def is_due(self, step: int, now_s: float) -> bool:
        """Whether `step`, which was just saved, should go to the level."""
        if self._last_step is not None and step <= self._last_step:
            return step == self._last_step  # what the level has of it is of an earlier save
        if self._every.seconds is not None:
            return now_s - self._last_s >= self._every.seconds
        n = self._every.steps or 1
        return self._last_step is None or step // n > self._last_step // n

    def taken(self, step: int, now_s: float) -> None:
        """`step` is on its way to the level, or is there."""
        self._last_step, self._last_s = step, now_s

    def given_up(self, step: int | None) -> None:
        """The level has nothing newer than `step`: a copy failed, or the run was rewound."""
        self._last_step = step
        if self._every.seconds is not None:
            self._last_s -= self._every.seconds  # at once
