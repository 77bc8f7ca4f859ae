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

from statehold.study.choose import Figures, best_of, choose, likely
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
ROUNDS_MAX = 5
PROOF_ROUNDS_MIN, PROOF_ROUNDS_MAX = 3, 9

Told = Callable[[str, float], None]  # what runs now, and the share of the time that is over


@dataclass(frozen=True, slots=True)
class Proof:
    """The chosen settings against the best of a kind, measured again in turns.

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
    """What was found: `refused` are the strategies that cannot be run here, and why."""

    middle: Strategy
    full: bool
    figures: Figures = field(default_factory=Figures)
    refused: dict[Strategy, str] = field(default_factory=dict)
    unmeasured: list[Strategy] = field(default_factory=list)
    rounds: int = 0
    chosen: Strategy = field(default_factory=Strategy)
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
    study.chosen = choose(study.figures, candidates, study.middle)
    _prove(study, clock)
    study.took_s = clock.elapsed_s
    return study


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
                self.time(case)
            self._study.rounds = max(self._study.rounds, index + 1)

    def time(self, case: Case) -> dict[Operation, float]:
        study = self._study
        if case.strategy in study.refused:
            return {}
        self._told(case.strategy.name, min(1.0, self.elapsed_s / self._seconds))
        timing = self._bench.time(case)
        if timing.refused:
            study.refused[case.strategy] = timing.refused
        study.figures.add(case.strategy, timing.rates)
        return timing.rates


def _judged(found: Sequence[Strategy]) -> list[Figure]:
    return [(strategy, operation) for strategy in found for operation in JUDGED]


# -- the proof -------------------------------------------------------------------------------------


def _prove(study: Study, clock: _Clock) -> None:
    engines = study.figures.engines()
    plain = bytes_of(study.chosen)
    others = [each for each in study.figures.strategies() if not each.is_engine]
    for operation in (Operation.OVERWRITE, Operation.COLD):
        _prove_one(study, clock, "statehold", operation, study.chosen, engines)
        _prove_one(study, clock, "bytes", operation, plain, others)


def _prove_one(
    study: Study,
    clock: _Clock,
    kind: str,
    operation: Operation,
    chosen: Strategy,
    pool: Sequence[Strategy],
) -> None:
    best = best_of(study.figures, pool, operation)
    if best is None:
        return
    ratios = [1.0] if best == chosen else _turns(clock, chosen, best, operation)
    if ratios:
        turns = 0 if best == chosen else len(ratios)
        study.proofs.append(
            Proof(kind, operation, chosen, best, median(ratios), min(ratios), max(ratios), turns)
        )


def _turns(clock: _Clock, chosen: Strategy, best: Strategy, operation: Operation) -> list[float]:
    """chosen / best of each turn; who goes first changes."""
    cases = cases_of([(chosen, operation), (best, operation)])
    ratios: list[float] = []
    for index in range(PROOF_ROUNDS_MAX):
        if index >= PROOF_ROUNDS_MIN and clock.is_over(1.0):
            break
        rates = {case.strategy: clock.time(case) for case in ordered(cases, index)}
        if not all(operation in found for found in rates.values()):
            return []
        ratios.append(rates[chosen][operation] / rates[best][operation])
    return ratios
