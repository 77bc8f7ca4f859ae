"""Which steps go to a level: each n-th, or one in so much time; and the user's notation of it.

Pure: the time is an argument. A step is due once a multiple of n steps, or that much time, has
passed since the last step of the level. A step that was due and could not be copied stays due. A
step that is saved again replaces its earlier copy, whatever the cadence.
"""

from __future__ import annotations

from dataclasses import dataclass

from statehold.errors import UsageError, shown
from statehold.units import parse_seconds


@dataclass(frozen=True, slots=True)
class Every:
    """So many steps, or so many seconds; neither: "auto"."""

    steps: int | None = None
    seconds: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.steps is None and self.seconds is None


def parse_every(value: int | str, level: str | None = None) -> Every:
    """10 -> each tenth step; "90s", "30min", "2h", "1d" -> time; "auto".

    Raises UsageError, which names the level.
    """
    if type(value) is int and value >= 1:
        return Every(steps=value)
    if value == "auto":
        return Every()
    seconds = parse_seconds(value)
    if seconds is not None:
        return Every(seconds=seconds)
    raise UsageError(
        "not a valid value of every=",
        facts={
            **({} if level is None else {"level": str(level)[:80]}),
            "expected": 'a number of steps, at least 1, a time ("90s", "30min", "2h"), or "auto"',
            "got": shown(value),
        },
    )


class Cadence:
    """When a level wants its next step. Not thread-safe.

    last_step, last_s: the newest step that the level has, and the time at which it was saved, which
        may be long before this process began; -inf: the first step is due.
    """

    def __init__(self, every: Every, last_step: int | None, last_s: float) -> None:
        self._every = every
        self._last_step = last_step
        self._last_s = last_s

    def is_due(self, step: int, now_s: float) -> bool:
        """Whether `step`, which was just saved, should go to the level."""
        if self._last_step is not None and step <= self._last_step:
            return step == self._last_step  # the level has an earlier save of it
        if self._every.seconds is not None:
            return now_s - self._last_s >= self._every.seconds
        n = self._every.steps or 1
        return self._last_step is None or step // n > self._last_step // n

    def every(self, steps: int) -> None:
        """From now on, each time that so many steps have passed."""
        self._every = Every(steps=steps)

    def taken(self, step: int, now_s: float) -> None:
        """`step` is on its way to the level, or is there."""
        self._last_step, self._last_s = step, now_s

    def go_on_from(self, step: int | None) -> None:
        """The next step follows `step`, to which the run was perhaps restored or rewound."""
        if step is not None and self._last_step is not None and step < self._last_step:
            self.given_up(step)

    def given_up(self, step: int | None) -> None:
        """The level has nothing newer than `step`: a copy failed, or the run was rewound."""
        self._last_step = step
        if self._every.seconds is not None:
            self._last_s -= self._every.seconds  # at once
