"""A whole study: rounds of cases until the time is over, a choice, and its proof.

Owns: the order of the work, and its duration; the result.
Invariants: the candidates of the choice are measured first, so a study that runs out of time has
them. Figures of one case lie minutes apart, so a median has seen the storage at several times. At
the end the choice and the best are measured again in turns, and that ratio is reported.
Not here: the cases (sweep), the choice (choose), the output (report).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from statehold.cli.study.choose import StudyFigures, best_of, choose, likely, margin, score
from statehold.cli.study.measure import Bench
from statehold.cli.study.strategies import Case, Operation, Strategy
from statehold.cli.study.sweep import (
    JUDGED,
    Contrast,
    Figure,
    bytes_of,
    cases_of,
    centre,
    comparisons,
    ordered,
    strategies,
)

# Shares of the time: rounds of everything, rounds of the likely ones, the proof.
FIRST, SECOND = 0.5, 0.65
ROUNDS_MAX = 9
TURNS_MIN, TURNS_MAX = 3, 15
CHALLENGES_MAX = 3
DUELS = 4  # that share what is left of the time
SLACK = 0.05
PROVED = (Operation.OVERWRITE, Operation.COLD)

Show = Callable[[str, float], None]  # what runs now, and the share of the time that is over


@dataclass(frozen=True, slots=True)
class Remeasured:
    """The chosen settings against the best other ones of a kind, measured again in turns.

    ratio: the median of the ratios of the turns; `low` and `high` are their ends.
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
    """The result: `refused` are the strategies that cannot run here, and the reasons.

    score, score_before: of the choice and of the middle, from the rounds. Scores that differ by
        less than `margin` are equal.
    """

    middle: Strategy
    full: bool
    compared: list[Contrast]
    figures: StudyFigures = field(default_factory=StudyFigures)
    refused: dict[Strategy, str] = field(default_factory=dict)
    unmeasured: list[Strategy] = field(default_factory=list)
    rounds: int = 0
    chosen: Strategy = field(default_factory=Strategy)
    score: float = 0.0
    score_before: float = 0.0
    margin: float = 0.0
    proofs: list[Remeasured] = field(default_factory=list)
    took_s: float = 0.0


def run(
    bench: Bench,
    copy_threads: int,
    seconds: float,
    full: bool,
    show: Show,
    more: Sequence[Contrast] = (),
) -> Study:
    """Measure, choose, prove. more: comparisons with strategies that statehold does not have."""
    middle = centre(copy_threads)
    study = Study(middle, full, [*more, *comparisons(middle)])
    clock = _Clock(bench, study, seconds, show)
    cases = cases_of(strategies(middle, full, study.compared))
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
    _judge(study)
    study.took_s = clock.elapsed_s
    return study


def _judge(study: Study) -> None:
    figures, pool = study.figures, study.figures.engines()
    study.score = score(figures, study.chosen, pool)
    study.score_before = score(figures, study.middle, pool)
    study.margin = margin(figures)


class _Clock:
    """Runs cases while there is time."""

    def __init__(self, bench: Bench, study: Study, seconds: float, show: Show) -> None:
        self._bench, self._study, self._seconds = bench, study, seconds
        self._show = show
        self._begin_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def share(self) -> float:
        """The share of the time that is over."""
        return min(1.0, self.elapsed_s / self._seconds)

    def is_over(self, share: float) -> bool:
        return self.elapsed_s >= share * self._seconds

    def rounds(self, cases: Sequence[Case], share: float, most: int) -> None:
        """Whole rounds until that share of the time is over.

        The first round may take all the time except that of the proof. Cases without time are not
        measured.
        """
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
        self._show(case.strategy.name, self.share)
        timing = self._bench.time(case)
        if timing.refused:
            study.refused[case.strategy] = timing.refused
        return timing.rates


def _judged(found: Sequence[Strategy]) -> list[Figure]:
    return [(strategy, operation) for strategy in found for operation in JUDGED]


# -- the proof -------------------------------------------------------------------------------------


def _prove(study: Study, clock: _Clock) -> None:
    """Let the best others challenge the choice; the one that is better side by side replaces it.

    Rounds compare figures that lie minutes apart. Turns compare figures that lie seconds apart.
    """
    beaten: set[Strategy] = set()
    for _ in range(CHALLENGES_MAX):
        pool = [each for each in study.figures.engines() if each not in beaten]
        duels = [
            _duel(clock, "statehold", study.chosen, rival)
            for rival in _rivals(study.figures, pool, study.chosen)
        ]
        study.proofs = [proof for duel in duels for proof in duel]
        lost = next((duel for duel in duels if is_lost(duel)), None)
        if lost is None:
            break
        beaten.add(study.chosen)
        study.chosen, study.proofs = lost[0].best, [_turned(proof) for proof in lost]
        if clock.is_over(1.0):
            break
    plain = bytes_of(study.chosen)
    others = [each for each in study.figures.strategies() if not each.is_engine]
    for rival in _rivals(study.figures, others, plain):
        study.proofs += _duel(clock, "bytes", plain, rival)


def _rivals(figures: StudyFigures, pool: Sequence[Strategy], chosen: Strategy) -> list[Strategy]:
    """The best others in the operations that are proved."""
    others = [each for each in pool if each != chosen]
    found = [best_of(figures, others, operation) for operation in PROVED]
    return list(dict.fromkeys(each for each in found if each is not None))


def is_lost(duel: Sequence[Remeasured]) -> bool:
    """Whether the other is better in its worst operation, by more than chance."""
    own = min((proof.ratio for proof in duel), default=1.0)
    others = min((1 / proof.ratio for proof in duel), default=1.0)
    return own < 1 - SLACK and others > own


def _turned(proof: Remeasured) -> Remeasured:
    """The same from the other side."""
    return replace(
        proof,
        chosen=proof.best,
        best=proof.chosen,
        ratio=1 / proof.ratio,
        low=1 / proof.high,
        high=1 / proof.low,
    )


def _duel(clock: _Clock, kind: str, chosen: Strategy, rival: Strategy) -> list[Remeasured]:
    """Both in turns, until a part of the remaining time is over; the first of each turn changes."""
    cases = cases_of([(each, operation) for each in (chosen, rival) for operation in PROVED])
    ratios: dict[Operation, list[float]] = {operation: [] for operation in PROVED}
    until = clock.share + (1 - clock.share) / DUELS
    for index in range(TURNS_MAX):
        if index >= TURNS_MIN and clock.is_over(until):
            break
        rates = {case.strategy: clock.time(case) for case in ordered(cases, index)}
        if not all(rates.values()):
            return []
        for operation, found in ratios.items():
            found.append(rates[chosen][operation] / rates[rival][operation])
    return [
        Remeasured(
            kind, operation, chosen, rival, median(found), min(found), max(found), len(found)
        )
        for operation, found in ratios.items()
    ]
