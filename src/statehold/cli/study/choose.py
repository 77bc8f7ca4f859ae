"""The choice of the settings, and the reasons: pure functions of figures.

Owns: the figures of a study and their medians, the score of a setting, the choice, and the findings
as sentences.
Invariants: the choice is one setting for saves and restores. It is the setting whose worst share of
the best is largest. If others are as good within the noise, the setting that changes least is
taken.
Not here: measuring (study), writing the profile (io/profile).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from statehold.cli.study.strategies import Operation, Strategy
from statehold.cli.study.sweep import JUDGED, Contrast, Figure, neighbours
from statehold.io.profile import StorageRates
from statehold.options.io import Moving

# Two settings whose scores differ by less are equally good, however still the storage is.
MARGIN_MIN = 0.03
# Before a figure was measured three times, its spread is unknown.
MARGIN_UNKNOWN = 0.1
SPREADS_MIN = 3
# The chance difference of two medians of n figures: median absolute deviation to standard
# deviation, deviation of one to that of a median, and two of them.
DEVIATIONS = 1.4826 * 1.2533 * 2**0.5
# A figure whose runs lie further apart has moved: it is marked.
MOVED = 1.25
LIKELY = 4
_GB = 1e9


@dataclass
class StudyFigures:
    """GB/s by strategy and operation, one for each time it was measured."""

    rates: dict[Figure, list[float]] = field(default_factory=dict)

    def add(self, strategy: Strategy, rates: dict[Operation, float]) -> None:
        for operation, rate in rates.items():
            self.rates.setdefault((strategy, operation), []).append(rate)

    def of(self, strategy: Strategy, operation: Operation) -> float | None:
        """The median, or None without measurements."""
        found = self.rates.get((strategy, operation))
        return median(found) if found else None

    def moved(self, strategy: Strategy, operation: Operation) -> bool:
        found = self.rates.get((strategy, operation), [1.0])
        return max(found) > MOVED * min(found)

    def strategies(self) -> list[Strategy]:
        return list(dict.fromkeys(strategy for strategy, _ in self.rates))

    def engines(self) -> list[Strategy]:
        """The strategies that a profile can ask for."""
        return [each for each in self.strategies() if each.is_engine]


def best_of(
    figures: StudyFigures, candidates: Iterable[Strategy], operation: Operation
) -> Strategy | None:
    """The candidate with the highest median, or None without measurements."""
    found = [(figures.of(each, operation) or 0.0, i, each) for i, each in enumerate(candidates)]
    top = max(found, key=lambda item: (item[0], -item[1]), default=None)
    return top[2] if top and top[0] > 0 else None


def score(figures: StudyFigures, strategy: Strategy, candidates: Iterable[Strategy]) -> float:
    """The smallest share of the best that a strategy reaches in any operation that counts."""
    pool, shares = list(candidates), []
    for operation in JUDGED:
        best = best_of(figures, pool, operation)
        top = figures.of(best, operation) if best else None
        if top:
            shares.append((figures.of(strategy, operation) or 0.0) / top)
    return min(shares, default=0.0)


def margin(figures: StudyFigures) -> float:
    """Scores that differ by less differ by chance, as the spread of the figures of a study
    shows."""
    found = [
        DEVIATIONS * _deviation(rates) / len(rates) ** 0.5
        for (strategy, operation), rates in figures.rates.items()
        if strategy.is_engine and operation in JUDGED and len(rates) >= SPREADS_MIN
    ]
    return max(MARGIN_MIN, median(found)) if found else MARGIN_UNKNOWN


def _deviation(rates: list[float]) -> float:
    """The median absolute deviation, as a share of the median."""
    middle = median(rates)
    return median(abs(rate - middle) for rate in rates) / middle


def combined(figures: StudyFigures, middle: Strategy, full: bool) -> Strategy:
    """The best value of each setting, as measured around the middle, combined.

    A value that wins by less than the noise stays at the middle's.
    """
    around = [each for each in neighbours(middle, full) if each in figures.engines()]
    best = middle
    for name in ("mover", "block_bytes", "depth", "copy_threads"):
        levels = [each for each in around if _changes(each, middle) <= {name}]
        winner = choose(figures, levels, middle)
        best = replace(best, **{name: getattr(winner, name)})
    return best


def likely(figures: StudyFigures, middle: Strategy, full: bool) -> list[Strategy]:
    """The candidates: the middle, the best of each setting together, and the best so far.

    They are measured more often, because the best of many single figures is the luckiest.
    """
    pool = figures.engines()
    ranked = sorted(pool, key=lambda each: -score(figures, each, pool))
    return list(dict.fromkeys([middle, combined(figures, middle, full), *ranked[:LIKELY]]))


def choose(figures: StudyFigures, candidates: list[Strategy], middle: Strategy) -> Strategy:
    """The settings for the profile, of `candidates`, judged by the best of everything."""
    scores = {each: score(figures, each, figures.engines()) for each in candidates}
    if not scores:
        return middle
    enough = max(scores.values()) - margin(figures)
    good = [each for each in candidates if scores[each] >= enough]
    return min(good, key=lambda each: (len(_changes(each, middle)), -scores[each]))


def _changes(strategy: Strategy, middle: Strategy) -> set[str]:
    names = ("mover", "block_bytes", "depth", "copy_threads")
    return {name for name in names if getattr(strategy, name) != getattr(middle, name)}


def moving_of(strategy: Strategy) -> Moving:
    """The entries of a profile for a strategy of the engine."""
    return Moving(
        buffer_bytes=strategy.block_bytes,
        queue_depth=strategy.depth,
        backend=strategy.mover.value,
        copy_threads=strategy.copy_threads,
    )


def rates_of(figures: StudyFigures) -> StorageRates | None:
    """The rates of the storage: the highest of any strategy, with or without copies and checksums,
    into new files or old ones."""
    write = max(top(figures, Operation.FRESH), top(figures, Operation.OVERWRITE))
    read = top(figures, Operation.COLD)
    return StorageRates(int(write * _GB), int(read * _GB)) if write and read else None


def top(figures: StudyFigures, operation: Operation) -> float:
    """The best rate of all strategies; 0 without measurements."""
    best = best_of(figures, figures.strategies(), operation)
    return (figures.of(best, operation) or 0.0) if best else 0.0


# -- findings --------------------------------------------------------------------------------------


def finding(figures: StudyFigures, same: Iterable[Contrast]) -> str | None:
    """Comparisons of the same two things as one sentence, or None without measurements."""
    parts, what = [], ""
    for each in same:
        a, b = figures.of(*each.a), figures.of(*each.b)
        if a and b:
            moved = figures.moved(*each.a) or figures.moved(*each.b)
            parts.append(f"{each.a[1].value} {a / b:.2f}{'~' * moved} ({a:.2f} / {b:.2f} GB/s)")
            what = f"{each.what}, as a share of {each.than}"
    return f"{what}: {', '.join(parts)}" if parts else None
