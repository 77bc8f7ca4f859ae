"""When a step is saved, and when it is copied to which level: by the user, or by measurement.

    Turns       which calls of save() save: the cadence of the first level, the same on all ranks
    Schedule    the cadences of all levels, from what rank 0 measures on its training thread

Invariants: a call that saves nothing costs microseconds, and touches no tensor, file or other rank.

Not here: the measurements (costs), the best interval (planners/intervals), how ranks talk
(save/publishing).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from statehold.checkpoint.cadence.costs import Interval, MeasuredCosts
from statehold.checkpoint.cadence.every import Cadence, Every, parse_every
from statehold.checkpoint.telemetry.watch import LevelWatch
from statehold.options import Options
from statehold.planners.intervals import Loss, rates_by_level, rates_of
from statehold.ranks.membership import Membership

# -- which calls of save() save --------------------------------------------------------------------
# A call is due if its step is past a multiple of n that the call before was not past. This looks
# back at one call only, due or not, and at n. Ranks with the same calls and the same n make the
# same decision without a message, whatever they decided before. A fixed n needs nothing else.
#
# If n changes (a time, or "auto"), rank 0 alone measures and decides. It announces n with the
# outcome of a committed save (learn), and of the next ones until n is in force. n comes into force
# with the LAG-th save that follows. No more than two saves are ever under way, so by then every
# rank has had that outcome, and the next one, and either announces n.
#
# A rank that missed both keeps the old n. It saves when no other rank does, or does not save when
# they do. This cannot last. A save that not all ranks take part in fails on those that do, and the
# rank's own next save is at most n steps away. After every failed save, a rank looks for the rule
# that rank 0 has left on the board. It adopts the rule if that is in force since a later call than
# its own (adopt). All ranks count all calls alike, and the rule on the board is no older than the
# newest save that rank 0 has ended. So no rank goes back, and with the rule of rank 0 it decides as
# rank 0 does.
#
# Until the first rule comes, n doubles with each save, so there are soon enough calls without a
# save.


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
    """The turns of one rank. Pure; learn and adopt may be called from another thread.

    steps: the fixed interval; None: rank 0 announces it. lag: the number of saves after which a
        rule holds; LAG among several ranks. last_step: of the last call; or, on all ranks alike,
        the step that the run was restored to, or rewound to. due: the numbers of the newest saves.
    rule: in force. pending: announced and not in force yet; `since` is the save that announced it.
    """

    def __init__(self, steps: int | None, lag: int = LAG) -> None:
        self.rule = SaveRule(-1, steps or 1)
        self._is_growing = steps is None
        self._lag = lag
        self.pending: SaveRule | None = None
        self._pending_last = -1
        self._found: SaveRule | None = None
        self.last_step: int | None = None
        self.due = deque([-1] * _RECENT, maxlen=_RECENT)

    def call(self, number: int, step: int | None, *, wanted: bool = False) -> bool:
        """Whether the call of save() with this number saves `step`. wanted: it saves in any case,
        on all ranks. step: None, if only this rank got no number, counts as the next one."""
        if step is None:
            step = 0 if self.last_step is None else self.last_step + 1
        found = self._found
        if found is not None and self.rule.since < found.since < number:
            self._hold(found)
        is_due = wanted or is_past_next(self.last_step, step, self.rule.steps)
        self.last_step = step
        if is_due:
            self.due.append(number)
            pending = self.pending
            if pending is not None and pending.since <= self.due[-1 - self._lag]:
                self.pending = None
                self._hold(SaveRule(number, pending.steps))
            elif self._is_growing:
                self.rule = SaveRule(-1, min(2 * self.rule.steps, GROWING_MAX))
        return is_due

    @property
    def settled(self) -> int:
        """The number of the last save but one before the newest. It has ended on all ranks once the
        newest has found room."""
        return self.due[-3]

    def learn(self, rule: SaveRule) -> None:
        """Take in the rule of a save's outcome; a rule may come several times."""
        if rule.since > self._pending_last:
            self._pending_last = rule.since
            self.pending = rule

    def adopt(self, rule: SaveRule) -> None:
        """The rule in force on rank 0."""
        self._found = rule

    def _hold(self, rule: SaveRule) -> None:
        self.rule = rule
        self._is_growing = False


def is_past_next(last: int | None, step: int, steps: int) -> bool:
    """Whether `step` is past a multiple of `steps` that `last` was not past.

    True for a first step, and for a step that is not newer, because it is saved again.
    """
    return last is None or step <= last or step // steps > last // steps


# -- which step goes to which level ----------------------------------------------------------------
# Rank 0 chooses with every committed save. It announces to the other ranks the steps of the first
# level, and gives each copier its interval. A process that is alone counts time as time. Several
# ranks cannot, so rank 0 converts it to steps.


NEVER = 1 << 62
LINE_RATIO = 1.5


class Spec(Protocol):
    """The user's options of a level."""

    @property
    def name(self) -> str: ...

    @property
    def every(self) -> int | str: ...

    @property
    def survives(self) -> Loss: ...


class NamedLevel(Protocol):
    @property
    def name(self) -> str: ...


class Copier(Protocol):
    """A copier of steps to a level; `place` is the level, or its copies on other hosts."""

    @property
    def level(self) -> str: ...

    @property
    def place(self) -> NamedLevel: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def copied(self) -> int:
        """The number of finished copies."""

    @property
    def took_s(self) -> float:
        """How long the newest of them took."""

    def every(self, interval: Interval) -> None:
        """Take steps in this interval from now on."""


class Schedule:
    """The cadences of a run, while its ranks stay the same.

    last_saved_s: when the first level's newest step was saved, on the clock that shows this time.
    """

    def __init__(
        self,
        levels: Sequence[Spec],
        copiers: Sequence[Copier],
        membership: Membership,
        options: Options,
        watches: Sequence[LevelWatch],
        last_saved_s: Callable[[float], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._levels = levels
        self._names = [level.name for level in levels]
        self._every = [parse_every(level.every) for level in levels]
        self._copiers = copiers
        self._options = options
        self._log = _Log(self._names, self._every, watches)
        first, is_alone = self._every[0], membership.world == 1
        is_timed = first.seconds is not None and is_alone
        self._timer = Cadence(first, None, last_saved_s(clock())) if is_timed else None
        self._failed: int | None = None
        # Whether rank 0 chooses the first level's interval, and announces it to the others.
        self.is_led = first.steps is None and not is_timed
        steps = NEVER if is_timed else first.steps
        self.turns = Turns(steps, lag=0 if is_alone else LAG)
        measured = self.is_led or any(every.is_auto for every in self._every)
        self._costs = MeasuredCosts(self._names) if measured and membership.leads else None
        self._copies = _Copies(copiers)
        self._intervals: dict[str, Interval] = {}

    # -- on the training thread --------------------------------------------------------------------

    def is_due(
        self, number: int, step: int, *, wanted: bool, is_saving: bool, gate_s: float
    ) -> bool:
        """Whether this call of save() saves.

        wanted: it does in any case. is_saving: an earlier save is under way. gate_s: how long the
            gate has held training up so far, in all.
        """
        now_s = self._clock()
        if self._costs is not None:
            under_way = self._copies.under_way(self._costs)
            if is_saving:
                under_way.add(self._names[0])
            self._costs.called(step, now_s, gate_s, frozenset(under_way))
        if self._timer is not None:
            is_lost = self._failed == self.turns.due[-1]  # then the level has an older step
            self._timer.go_on_from(-1 if is_lost else self.turns.last_step)
            wanted = wanted or self._timer.is_due(step, now_s)
        is_due = self.turns.call(number, step, wanted=wanted)
        if is_due and self._timer is not None:
            self._timer.taken(step, now_s)
        return is_due

    def saved(self, blocked_s: float, gate_s: float) -> None:
        """save() has begun a save, and returns."""
        if self._costs is not None:
            self._costs.saved(blocked_s, gate_s)

    # -- on the commit thread ----------------------------------------------------------------------

    def committed(self, number: int, took_s: float, hosts: int) -> None:
        """Rank 0: the save with this number is committed. hosts: those of the job."""
        if self._costs is None:
            return
        self._copies.took(self._costs, self._names[0], self._names[0], took_s)
        step_s = self._costs.step_s
        if step_s is None or self.turns.pending is not None:
            return
        rates = rates_of(self._options.nodes or hosts, self._options.node_mtbf_s)
        needed = rates_by_level([level.survives for level in self._levels], rates)
        fixed_s = [_fixed_s(every, step_s) for every in self._every]
        self._set(number, self._costs.chosen(needed, fixed_s, self._intervals))

    def failed(self, number: int) -> None:
        """The save with this number has failed, so the newest step at the first level is older. The
        next call hears of it: the timer is of the training thread alone."""
        self._failed = number

    def message(self) -> list[int] | None:
        """Rank 0: the facts for the others in the outcome of a committed save."""
        rule = self.turns.pending
        return None if rule is None else [rule.since, rule.steps]

    def learn(self, message: Sequence[int] | None) -> None:
        """The others: the facts in the outcome of a committed save."""
        if message is not None:
            self.turns.learn(SaveRule(*message))

    def note(self) -> list[list[int]]:
        """Rank 0: the note for a rank that missed an outcome."""
        rules = (self.turns.rule, self.turns.pending)
        return [[rule.since, rule.steps] for rule in rules if rule is not None]

    def catch_up(self, note: Sequence[Sequence[int]]) -> None:
        """A rank that may have missed something, with the note of rank 0."""
        rule, *pending = [SaveRule(*each) for each in note]
        self.turns.adopt(rule)
        for each in pending:
            self.turns.learn(each)

    def _set(self, number: int, intervals: Mapping[str, Interval]) -> None:
        if not intervals:
            return
        first = intervals[self._names[0]]
        if self.is_led and first.steps != self.turns.rule.steps:
            self.turns.learn(SaveRule(number, first.steps))
        for copier in self._copiers:
            # The copies of the first level on other hosts get its steps.
            interval = None if copier.level == self._names[0] else intervals.get(copier.level)
            if interval is not None and self._every[self._names.index(copier.level)].is_auto:
                copier.every(interval)
        self._intervals = dict(intervals)
        self._log.chosen(self._intervals)

    # -- status ------------------------------------------------------------------------------------

    def interval(self, name: str) -> Interval | None:
        """The interval chosen for a level; None without a choice, and on ranks other than 0."""
        every = self._every[self._names.index(name)]
        return self._intervals.get(name) if every.is_auto else None


class _Copies:
    """Which copies are under way, and how long a step takes to a level with its copies on other
    hosts."""

    def __init__(self, copiers: Sequence[Copier]) -> None:
        self._copiers = copiers
        self._finished = [0] * len(copiers)
        self._on_hosts_s: dict[str, float] = {}

    def under_way(self, costs: MeasuredCosts) -> set[str]:
        """The levels that may slow the training down now, or have since the last call."""
        found = set()
        for index, copier in enumerate(self._copiers):
            finished = copier.copied
            if copier.is_busy or finished != self._finished[index]:
                found.add(copier.level)
            if finished != self._finished[index]:
                self._finished[index] = finished
                self.took(costs, copier.level, copier.place.name, copier.took_s)
        return found

    def took(self, costs: MeasuredCosts, level: str, place: str, seconds: float) -> None:
        """A step took so long to `place`, which is the level or its copies on other hosts."""
        if place != level:
            self._on_hosts_s[level] = seconds
        else:
            costs.took(level, seconds + self._on_hosts_s.get(level, 0.0))


class _Log:
    """Logs a line for each level whose interval differs much from the last logged one."""

    def __init__(
        self, names: Sequence[str], every: Sequence[Every], watches: Sequence[LevelWatch]
    ) -> None:
        self._levels = [each for each in zip(names, every, watches, strict=True) if each[1].is_auto]
        self._lines: dict[str, int] = {}

    def chosen(self, intervals: Mapping[str, Interval]) -> None:
        for name, _, watch in self._levels:
            interval, logged = intervals[name], self._lines.get(name)
            watch.interval(interval.seconds)
            if logged is None or not logged / LINE_RATIO < interval.steps < logged * LINE_RATIO:
                self._lines[name] = interval.steps
                watch.log.info("level %s gets a step %s", name, interval)


def _fixed_s(every: Every, step_s: float) -> float | None:
    return every.seconds if every.steps is None else every.steps * step_s
