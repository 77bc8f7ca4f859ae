"""When a step is saved, and when it is copied to which level: by the user, or by measurement.

Rank 0 measures on its training thread and chooses with every committed save. It announces to the
other ranks the steps of the first level (turns), and gives each copier its interval. A process that
is alone counts time as time. Several ranks cannot, so rank 0 converts it to steps.

Invariants: a call that saves nothing costs microseconds, and touches no tensor, file or other rank.
Not here: the measurements (costs), the best interval (planners/intervals), how ranks come to the
same turns (turns) and talk (save/publishing).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from statehold.checkpoint.cadence.costs import Interval, MeasuredCosts
from statehold.checkpoint.cadence.every import Cadence, Every, parse_every
from statehold.checkpoint.cadence.turns import LAG, SaveRule, Turns
from statehold.checkpoint.telemetry.copies import LevelWatch
from statehold.options import Options
from statehold.planners.failures import Loss, rates_by_level, rates_of
from statehold.ranks.membership import Membership

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
