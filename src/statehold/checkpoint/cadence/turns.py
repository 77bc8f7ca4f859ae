"""Which calls of save() save: the cadence of the first level, the same on all ranks of a job.

A call is due when its step is past a multiple of n that the call before was not past. That looks
back at one call only, due or not, and at n: ranks that call alike and have the same n decide alike,
without a word between them, whatever they decided before. A fixed n is all that is needed then.

Where n changes (a time, or "auto"), rank 0 alone measures and decides, and tells it with the
outcome of a committed save (learn), and of the next ones until it is in force. It comes into force
with the LAG-th save that follows: no more than two saves are ever under way, so every rank has had
that outcome by then and the next one too, either of which tells it.

A rank that missed both goes on with the old n, and saves where no other does, or not where they do.
It cannot do so for ever. A save that not all ranks take part in fails on those that do, and its own
next one is at most n steps away; with every save that failed, a rank looks for the rule that rank 0
has left on the board, and takes it over if it is in force since a later call than its own (adopt).
Ranks count all calls alike, and what is left there is no older than the newest save that rank 0 has
ended: so no rank goes back, and once it has the rule of rank 0 it decides as rank 0 does.

Until the first rule is told, n doubles with each save: there are soon calls enough without one.
Pure; learn and adopt may be called from another thread.
Not here: what n should be (intervals, checkpoint/cadence/costs), how it travels (save/publishing).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["LAG", "Rule", "Turns", "is_past_next"]

# When a save is called, the one before the two that may be under way has ended: 3 back. One more,
# so that the outcome of the save after the one that told a rule first is there, too.
LAG = 4
GROWING_MAX = 8
_RECENT = LAG + 1


@dataclass(frozen=True, slots=True)
class Rule:
    """Every so many steps, in calls above the number `since`."""

    since: int
    steps: int


class Turns:
    """The turns of one rank. steps: every so many; None: what rank 0 tells. lag: after how many
    saves it holds; LAG among several ranks."""

    def __init__(self, steps: int | None, lag: int = LAG) -> None:
        self._rule = Rule(-1, steps or 1)
        self._is_growing = steps is None
        self._lag = lag
        self._told: Rule | None = None
        self._told_last = -1
        self._found: Rule | None = None
        self._last_step: int | None = None
        self._due = deque([-1] * _RECENT, maxlen=_RECENT)

    def call(self, number: int, step: int, *, wanted: bool = False) -> bool:
        """Whether the call of save() with this number is to save `step`. wanted: it does so in any
        case, on all ranks."""
        found = self._found
        if found is not None and self._rule.since < found.since < number:
            self._hold(found)
        is_due = wanted or is_past_next(self._last_step, step, self._rule.steps)
        self._last_step = step
        if is_due:
            self._saving(number)
        return is_due

    def goes_on_from(self, step: int) -> None:
        """All ranks: the run was restored to this step, or taken back to it."""
        self._last_step = step

    @property
    def settled(self) -> int:
        """The number of the last save but one before the newest: it has ended on all ranks, once
        the newest has found room."""
        return self._due[-3]

    @property
    def rule(self) -> Rule:
        """What is in force."""
        return self._rule

    @property
    def told(self) -> Rule | None:
        """What was told and is not in force yet: `since` is the number of the save that told it."""
        return self._told

    def learn(self, told: Rule) -> None:
        """What the outcome of a save tells; perhaps not for the first time."""
        if told.since > self._told_last:
            self._told_last = told.since
            self._told = told

    def adopt(self, rule: Rule) -> None:
        """What is in force on rank 0."""
        self._found = rule

    def _saving(self, number: int) -> None:
        self._due.append(number)
        told = self._told
        if told is not None and told.since <= self._due[-1 - self._lag]:
            self._told = None
            self._hold(Rule(number, told.steps))
        elif self._is_growing:
            self._rule = Rule(-1, min(2 * self._rule.steps, GROWING_MAX))

    def _hold(self, rule: Rule) -> None:
        self._rule = rule
        self._is_growing = False


def is_past_next(last: int | None, step: int, steps: int) -> bool:
    """Whether `step` is past a multiple of `steps` that `last` was not past. A first step is, and
    one that is not newer: it is saved again."""
    return last is None or step <= last or step // steps > last // steps
