"""Which calls of save() save: the cadence of the first level, the same on all ranks of a job.

A call is due if its step is past a multiple of n that the call before was not past. This looks back
at one call only, due or not, and at n. Ranks with the same calls and the same n make the same
decision without a message, whatever they decided before. A fixed n needs nothing else.

If n changes (a time, or "auto"), rank 0 alone measures and decides. It announces n with the outcome
of a committed save (learn), and of the next ones until n is in force. n comes into force with the
LAG-th save that follows. No more than two saves are ever under way, so by then every rank has had
that outcome, and the next one, and either announces n.

A rank that missed both keeps the old n. It saves when no other rank does, or does not save when
they do. This cannot last. A save that not all ranks take part in fails on those that do, and the
rank's own next save is at most n steps away. After every failed save, a rank looks for the rule
that rank 0 has left on the board. It adopts the rule if that is in force since a later call than
its own (adopt). All ranks count all calls alike, and the rule on the board is no older than the
newest save that rank 0 has ended. So no rank goes back, and with the rule of rank 0 it decides as
rank 0 does.

Until the first rule comes, n doubles with each save, so there are soon enough calls without a save.
Pure; learn and adopt may be called from another thread.
Not here: the choice of n (intervals, checkpoint/cadence/costs), how it travels (save/publishing).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# When a save is called, the save 3 back has ended, because only two may be under way. One more, so
# that the outcome of the save after the one that first announced a rule is there, too.
LAG = 4
GROWING_MAX = 8
_RECENT = LAG + 1


@dataclass(frozen=True, slots=True)
class SaveRule:
    """A save at every so many steps, for calls above the number `since`."""

    since: int
    steps: int


class Turns:
    """The turns of one rank.

    steps: the fixed interval; None: rank 0 announces it. lag: the number of saves after which a
        rule holds; LAG among several ranks.
    """

    def __init__(self, steps: int | None, lag: int = LAG) -> None:
        self._rule = SaveRule(-1, steps or 1)
        self._is_growing = steps is None
        self._lag = lag
        self._pending: SaveRule | None = None
        self._pending_last = -1
        self._found: SaveRule | None = None
        self._last_step: int | None = None
        self._due = deque([-1] * _RECENT, maxlen=_RECENT)

    def call(self, number: int, step: int, *, wanted: bool = False) -> bool:
        """Whether the call of save() with this number saves `step`. wanted: it saves in any case,
        on all ranks."""
        found = self._found
        if found is not None and self._rule.since < found.since < number:
            self._hold(found)
        is_due = wanted or is_past_next(self._last_step, step, self._rule.steps)
        self._last_step = step
        if is_due:
            self._saving(number)
        return is_due

    def goes_on_from(self, step: int) -> None:
        """All ranks: the run was restored to this step, or rewound to it."""
        self._last_step = step

    @property
    def settled(self) -> int:
        """The number of the last save but one before the newest. It has ended on all ranks once the
        newest has found room."""
        return self._due[-3]

    @property
    def rule(self) -> SaveRule:
        """The rule in force."""
        return self._rule

    @property
    def pending(self) -> SaveRule | None:
        """A rule that was announced and is not in force yet. `since` is the save that announced
        it."""
        return self._pending

    def learn(self, rule: SaveRule) -> None:
        """Take in the rule of a save's outcome; a rule may come several times."""
        if rule.since > self._pending_last:
            self._pending_last = rule.since
            self._pending = rule

    def adopt(self, rule: SaveRule) -> None:
        """The rule in force on rank 0."""
        self._found = rule

    def _saving(self, number: int) -> None:
        self._due.append(number)
        pending = self._pending
        if pending is not None and pending.since <= self._due[-1 - self._lag]:
            self._pending = None
            self._hold(SaveRule(number, pending.steps))
        elif self._is_growing:
            self._rule = SaveRule(-1, min(2 * self._rule.steps, GROWING_MAX))

    def _hold(self, rule: SaveRule) -> None:
        self._rule = rule
        self._is_growing = False


def is_past_next(last: int | None, step: int, steps: int) -> bool:
    """Whether `step` is past a multiple of `steps` that `last` was not past.

    True for a first step, and for a step that is not newer, because it is saved again.
    """
    return last is None or step <= last or step // steps > last // steps
