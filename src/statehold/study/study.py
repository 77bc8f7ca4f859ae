"""A whole study: rounds of cases until the time is over, a choice, and its proof.

Owns: what happens in which order, and how long; the result.
Holds: the candidates of the choice are measured first, so a study that runs out of time has them;
figures of one case lie minutes apart, so a median has seen the storage at several times; at the
end what was chosen and what was best are measured again in turns, and that ratio is reported.
Not here: the cases (sweep), the choice (choose), how it looks (report).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from statehold.study.choose import Figures, best_of, choose, likely, margin, score
from statehold.study.measure import Bench
from statehold.study.strategies import Case, Operation, Strategy
from statehold.study.sweep import (
    JUDGED,
    Figure,
    bytes_of,
    cases_of,
    centre,
    ordered,
    strategies,
)

__all__ = ["Proof", "Study", "run"]

# Shares of the time: rounds of everything, rounds of the likely ones, the proof.
FIRST, SECOND = 0.6, 0.8
ROUNDS_MAX = 9
TURNS_MIN, TURNS_MAX = 3, 15

Told = Callable[[str, float], None]  # what runs now, and the share of the time that is over


@dataclass(frozen=True, slots=True)
class Proof:
    """The chosen settings against the best other ones of a kind, measured again in turns.

    ratio: the median of the ratios of the turns, `low` and `high` their ends.
    """

    kind: str  # "statehold": of all settings; "bytes": of all strategies, without copy and checksum
    operation: Operation
    chosen: Strategy
    best: Strategy
    ratio: float
    low: float
    high: float
    turns: int


@dataclass
class Study:
    """What was found: `refused` are the strategies that cannot be run here, and why.

    score, score_before: of what was chosen and of the middle, when it was chosen; scores that
    differ by less than `margin` were equal.
    """

    middle: Strategy
    full: bool
    figures: Figures = field(default_factory=Figures)
    refused: dict[Strategy, str] = field(default_factory=dict)
    unmeasured: list[Strategy] = field(default_factory=list)
    rounds: int = 0
    chosen: Strategy = field(default_factory=Strategy)
    score: float = 0.0
    score_before: float = 0.0
    margin: float = 0.0
    proofs: list[Proof] = field(default_factory=list)
    took_s: float = 0.0


def run(bench: Bench, copy_threads: int, seconds: float, full: bool, told: Told) -> Study:
    """Measure, choose, prove."""
    study = Study(centre(copy_threads), full)
    clock = _Clock(bench, study, seconds, told)
    cases = cases_of(strategies(study.middle, full))
    clock.rounds(cases, FIRST, ROUNDS_MAX)
    study.unmeasured = [
        case.strategy
        for case in cases
        if case.strategy not in study.refused and study.figures.of(case.strategy, JUDGED[0]) is None
    ]
    candidates = likely(study.figures, study.middle, full)
    clock.rounds(cases_of(_judged(candidates)), SECOND, ROUNDS_MAX)
    _choose(study, candidates)
    _prove(study, clock)
    study.took_s = clock.elapsed_s
    return study


def _choose(study: Study, candidates: list[Strategy]) -> None:
    figures, pool = study.figures, study.figures.engines()
    study.chosen = choose(figures, candidates, study.middle)
    study.score = score(figures, study.chosen, pool)
    study.score_before = score(figures, study.middle, pool)
    study.margin = margin(figures)


class _Clock:
    """Runs cases while there is time."""

    def __init__(self, bench: Bench, study: Study, seconds: float, told: Told) -> None:
        self._bench, self._study, self._seconds = bench, study, seconds
        self._told = told
        self._begin_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    def is_over(self, share: float) -> bool:
        return self.elapsed_s >= share * self._seconds

    def rounds(self, cases: Sequence[Case], share: float, most: int) -> None:
        """Whole rounds until that share of the time is over. The first may take all but what the
        proof needs; what it does not come to is not measured."""
        for index in range(most):
            for case in ordered(cases, index):
                if self.is_over(SECOND if index == 0 else share):
                    return
                self._study.figures.add(case.strategy, self.time(case))
            self._study.rounds = max(self._study.rounds, index + 1)

    def time(self, case: Case) -> dict[Operation, float]:
        study = self._study
        if case.strategy in study.refused:
            return {}
        self._told(case.strategy.name, min(1.0, self.elapsed_s / self._seconds))
        timing = self._bench.time(case)
        if timing.refused:
            study.refused[case.strategy] = timing.refused
        return timing.rates


def _judged(found: Sequence[Strategy]) -> list[Figure]:
    return [(strategy, operation) for strategy in found for operation in JUDGED]


# -- the proof -------------------------------------------------------------------------------------


def _prove(study: Study, clock: _Clock) -> None:
    engines = study.figures.engines()
    plain = bytes_of(study.chosen)
    others = [each for each in study.figures.strategies() if not each.is_engine]
    pairs = [
        (kind, operation, chosen, pool)
        for operation in (Operation.OVERWRITE, Operation.COLD)
        for kind, chosen, pool in (("statehold", study.chosen, engines), ("bytes", plain, others))
    ]
    for number, (kind, operation, chosen, pool) in enumerate(pairs, 1):
        best = best_of(study.figures, [each for each in pool if each != chosen], operation)
        until = SECOND + (1 - SECOND) * number / len(pairs)
        ratios = _turns(clock, chosen, best, operation, until) if best else []
        if best and ratios:
            ends = min(ratios), max(ratios)
            study.proofs.append(
                Proof(kind, operation, chosen, best, median(ratios), *ends, len(ratios))
            )


def _turns(
    clock: _Clock, chosen: Strategy, best: Strategy, operation: Operation, until: float
) -> list[float]:
    """chosen / best of each turn; who goes first changes."""
    cases = cases_of([(chosen, operation), (best, operation)])
    ratios: list[float] = []
    for index in range(TURNS_MAX):
        if index >= TURNS_MIN and clock.is_over(until):
            break
        rates = {case.strategy: clock.time(case) for case in ordered(cases, index)}
        if not all(operation in found for found in rates.values()):
            return []
        ratios.append(rates[chosen][operation] / rates[best][operation])
    return ratios
