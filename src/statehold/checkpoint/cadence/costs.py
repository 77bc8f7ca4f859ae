"""The cost of saving for the training, measured while it runs, and the resulting intervals.

Three figures for each level, from the calls of save() on the training thread:
- The time that save() and the gate have blocked. It is known exactly, and only for the first level.
- How much slower steps are while a step is saved, or copied to a level. This is the difference of
  the medians of recent steps that are equal in all else, as far as it is above their noise. The
  median of several such figures counts, so a change of the steps themselves does not.
- The duration of a save or a copy, which says how many steps are slower.

Invariants: a figure that is not above the noise, or below a thousandth of a step, counts as zero.
Sometimes there is nothing to compare with: at first, when steps have changed, or after thousands of
them. Then a level rests for as long as it is busy. An interval changes only if that saves a
twentieth of its loss, so it does not flap. The times are arguments. Thread-safe.
Not here: the formulae (planners/intervals), the caller (schedule).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from statehold.planners.intervals import LevelCost, choose, loss, waste
from statehold.units import format_seconds

SAMPLES = 128
SAMPLES_MIN = 5
SAVES = 32
FRESH = 1024  # calls
STALE = 8192
WINDOWS = 9
FREE = 1e-3
SURE = 3.0  # standard errors
WORTH_IT = 1.05
DRIFT = 0.1
SLACK = 0.2
_QUIET: frozenset[str] = frozenset()

Samples = Sequence[tuple[int, float]]  # the number of the call, and seconds


@dataclass(frozen=True, slots=True)
class Interval:
    """How often a level gets a step, and why.

    steps, seconds: the interval.
    cost_s: the time that training loses with each step.
    mtbf_s: the mean time between failures after which a restart needs this level.
    waste: the expected share of the training that is lost to both, to saving and to repeated work.
    """

    steps: int
    seconds: float
    cost_s: float
    mtbf_s: float
    waste: float

    def __str__(self) -> str:
        steps = "step" if self.steps == 1 else f"{self.steps} steps"
        text = f"every {steps} ({format_seconds(self.seconds)})"
        cost = f"costs {format_seconds(self.cost_s)}" if self.cost_s else "is free"
        if math.isfinite(self.mtbf_s):
            cost += f", and is needed once in {format_seconds(self.mtbf_s)}"
        return f"{text}: each {cost}; {100 * self.waste:.2g} % of the time is lost"


class MeasuredCosts:
    """Measures, and chooses, for rank 0. names: the levels, nearest first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._guard = threading.Lock()
        self._samples: dict[frozenset[str], deque[tuple[int, float]]] = {}
        self._strides: deque[int] = deque(maxlen=SAMPLES)
        self._blocked: deque[float] = deque(maxlen=SAVES)
        self._took: dict[str, deque[float]] = {name: deque(maxlen=SAVES) for name in names}
        self._last: tuple[int, float, float] | None = None  # step, time, time in the gate
        self._since_s: float | None = None  # time in the gate at the newest save
        self._call_s = 0.0  # what the newest call has blocked
        self._under_way = _QUIET
        self._calls = 0
        self._slower: dict[str, _Slower] = {}

    # -- on the training thread --------------------------------------------------------------------

    def called(self, step: int, now_s: float, gate_s: float, under_way: frozenset[str]) -> None:
        """save() was called while the levels with these names were being written."""
        with self._guard:
            self._calls += 1
            if self._last is not None and step > self._last[0]:
                stride = step - self._last[0]
                spent_s = now_s - self._last[1] - self._call_s - (gate_s - self._last[2])
                during = self._under_way | under_way
                samples = self._samples.setdefault(during, deque(maxlen=SAMPLES))
                samples.append((self._calls, spent_s / stride))
                self._strides.append(stride)
            self._last, self._under_way, self._call_s = (step, now_s, gate_s), under_way, 0.0

    def saved(self, blocked_s: float, gate_s: float) -> None:
        """save() has begun a save, and returns.

        gate_s: all time that was spent in the gate before it, which earlier saves have cost.
        """
        with self._guard:
            if self._since_s is not None:
                self._blocked[-1] += gate_s - self._since_s
            self._blocked.append(blocked_s)
            self._since_s = gate_s
            self._call_s = blocked_s
            self._under_way |= {self._names[0]}

    # -- on other threads --------------------------------------------------------------------------

    def took(self, name: str, seconds: float) -> None:
        """A save, or a copy to a level, took so long."""
        with self._guard:
            self._took[name].append(seconds)

    @property
    def step_s(self) -> float | None:
        """How long a step takes; None while that is not known."""
        with self._guard:
            return self._step_s()

    def chosen(
        self, rates: Sequence[float], fixed_s: Sequence[float | None], now: Mapping[str, Interval]
    ) -> dict[str, Interval]:
        """The intervals of all levels from now on; those of `now` unless a change is worth it.

        rates, fixed_s: for each level, the failures a second that need it, and its interval if the
            user gave it. Empty while too little is known.
        """
        with self._guard:
            step_s = self._step_s()
            if step_s is None or len(self._blocked) < 2:
                return {}
            stride = int(median(self._strides))
            costs = [
                self._cost(name, rate, fixed, step_s)
                for name, rate, fixed in zip(self._names, rates, fixed_s, strict=True)
            ]
        best = [stride * n for n in choose(costs, stride * step_s)]
        if now and all(name in now for name in self._names):
            kept = [now[name].steps for name in self._names]
            if _can(costs, kept, step_s) and not _is_worth_it(costs, kept, best, step_s):
                best = [_followed(*each) for each in zip(costs, kept, best, strict=True)]
        return {
            name: _interval(cost, steps, step_s)
            for name, cost, steps in zip(self._names, costs, best, strict=True)
        }

    # -- what was measured -------------------------------------------------------------------------

    def _step_s(self) -> float | None:
        quiet = self._fresh(_QUIET)
        if len(quiet) >= SAMPLES_MIN:
            return median(_seconds(quiet))
        known = [each for each in map(self._fresh, self._samples) if len(each) >= SAMPLES_MIN]
        return min((median(_seconds(each)) for each in known), default=None)

    def _cost(self, name: str, rate: float, fixed_s: float | None, step_s: float) -> LevelCost:
        took_s = median(self._took[name]) if self._took[name] else 0.0
        slower_s = self._slower_s(name)
        cost_s = (slower_s or 0.0) * (1 + took_s / step_s)
        if name == self._names[0]:
            cost_s += median(self._blocked)
        if cost_s <= FREE * step_s:
            cost_s = 0.0
        busy_s = took_s
        if slower_s is None:  # some steps must be without it
            busy_s = 2 * took_s + SAMPLES_MIN * step_s
        return LevelCost(cost_s, rate, busy_s, fixed_s=fixed_s)

    def _slower_s(self, name: str) -> float | None:
        """By how much a step is slower while `name` is written; None: not measured yet."""
        known = self._slower.setdefault(name, _Slower())
        busy, quiet = self._pair(name)
        if _are_comparable(busy, quiet):
            known.found(self._calls, _seconds(busy), _seconds(quiet))
        elif len(busy) >= SAMPLES_MIN and known.is_stale(self._calls, median(_seconds(busy))):
            return None
        return known.seconds

    def _pair(self, name: str) -> tuple[Samples, Samples]:
        """Steps with and without `name` that are equal in all else."""
        pairs = [
            (self._fresh(during), self._fresh(during - {name}))
            for during in self._samples
            if name in during
        ]
        return max(pairs, key=lambda pair: min(map(len, pair)), default=([], []))

    def _fresh(self, during: frozenset[str]) -> Samples:
        found = self._samples.get(during, ())
        return [sample for sample in found if sample[0] > self._calls - FRESH]


class _Slower:
    """By how much steps are slower, measured again and again."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, float]] = deque(maxlen=WINDOWS)
        self._error_s = 0.0
        self._at, self._busy_s = 0, 0.0

    def found(self, call: int, busy: Sequence[float], quiet: Sequence[float]) -> None:
        self._at, self._busy_s = call, median(busy)
        self._error_s = math.hypot(_error_s(busy), _error_s(quiet))
        if self._found and call - self._found[-1][0] < FRESH / 2:
            call, _ = self._found.pop()
        self._found.append((call, self._busy_s - median(quiet)))

    def is_stale(self, call: int, busy_s: float) -> bool:
        is_other = abs(busy_s - self._busy_s) > DRIFT * self._busy_s
        return not self._found or is_other or call - self._at > STALE

    @property
    def seconds(self) -> float | None:
        """None while nothing is known.

        There is no cliff at the noise, on which an interval would go up and down.
        """
        if not self._found:
            return None
        error_s = self._error_s / math.sqrt(len(self._found))
        return max(0.0, median(each for _, each in self._found) - SURE * error_s)


def _seconds(samples: Samples) -> list[float]:
    return [seconds for _, seconds in samples]


def _are_comparable(busy: Samples, quiet: Samples) -> bool:
    """Whether there are enough of both, and they are of the same time."""
    if min(len(busy), len(quiet)) < SAMPLES_MIN:
        return False
    return abs(median(call for call, _ in busy) - median(call for call, _ in quiet)) < FRESH / 4


def _error_s(samples: Sequence[float]) -> float:
    """The standard error of a median, of samples with outliers."""
    middle = median(samples)
    spread = 1.4826 * median(abs(each - middle) for each in samples)
    return 1.2533 * spread / math.sqrt(len(samples))


def _followed(cost: LevelCost, kept: int, best: int) -> int:
    """The interval of a level that stays; a given time is followed when the steps change."""
    return best if cost.fixed_s and abs(best - kept) > DRIFT * kept else kept


def _can(costs: Sequence[LevelCost], kept: Sequence[int], step_s: float) -> bool:
    """Whether no interval is shorter than its level can sustain."""
    pairs = zip(costs, kept, strict=True)
    return all(n * step_s >= (1 - SLACK) * cost.busy_s for cost, n in pairs if not cost.fixed_s)


def _is_worth_it(
    costs: Sequence[LevelCost], kept: Sequence[int], best: Sequence[int], step_s: float
) -> bool:
    def lost(steps: Sequence[int]) -> float:
        return sum(loss(cost, n * step_s) for cost, n in zip(costs, steps, strict=True))

    return lost(kept) > WORTH_IT * lost(best)


def _interval(cost: LevelCost, steps: int, step_s: float) -> Interval:
    return Interval(
        steps,
        steps * step_s,
        cost.cost_s,
        1 / cost.rate if cost.rate else math.inf,
        waste(cost, steps * step_s),
    )
