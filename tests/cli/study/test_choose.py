"""The choice and the findings, from figures that were made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from statehold.cli.study.strategies import (
    JUDGED,
    Contrast,
    MovedBy,
    Operation,
    Strategy,
    StudyFigures,
    best_of,
    bytes_of,
    centre,
    choose,
    combined,
    finding,
    likely,
    margin,
    moving_of,
    neighbours,
    rates_of,
    score,
)
from statehold.io.profile import StorageRates
from statehold.options.io import Moving
from statehold.units import MiB

MIDDLE = centre(2)
FRESH, OVERWRITE, COLD = JUDGED


def figures_of(rate: Callable[[Strategy, Operation], float]) -> StudyFigures:
    """What a sweep around the middle would measure on a storage with these rates."""
    figures = StudyFigures()
    for strategy in (*neighbours(MIDDLE, False), *neighbours(bytes_of(MIDDLE), False)):
        figures.add(strategy, {operation: rate(strategy, operation) for operation in JUDGED})
    return figures


def test_nothing_changes_for_noise() -> None:
    figures = figures_of(lambda s, _: 4.0 if s == MIDDLE else 4.1)
    assert choose(figures, figures.engines(), MIDDLE) == MIDDLE
    assert combined(figures, MIDDLE, False) == MIDDLE


def test_what_moves_more_has_to_win_by_more() -> None:
    def rate(factor: float, strategy: Strategy, _: Operation) -> float:
        return factor * (4.4 if strategy.depth == 1 else 4.0)

    def study_of(spread: float) -> StudyFigures:
        figures = figures_of(partial(rate, 1.0))
        for factor in (1 - spread, 1 + spread):
            again = figures_of(partial(rate, factor))
            for figure, rates in again.rates.items():
                figures.rates[figure] += rates
        return figures

    still, moving = study_of(0.01), study_of(0.2)
    assert margin(StudyFigures()) == 0.1
    assert margin(still) == 0.03
    assert margin(moving) > 0.1
    assert choose(still, still.engines(), MIDDLE) == replace(MIDDLE, depth=1)
    assert choose(moving, moving.engines(), MIDDLE) == MIDDLE


def test_what_is_clearly_better_is_taken() -> None:
    small = replace(MIDDLE, block_bytes=4 * MiB)
    figures = figures_of(lambda s, _: 5.0 if s.block_bytes == 4 * MiB else 4.0)
    assert choose(figures, figures.engines(), MIDDLE) == small


def test_the_best_levels_are_combined() -> None:
    def rate(strategy: Strategy, _: Operation) -> float:
        better = (strategy.block_bytes == 4 * MiB, strategy.mover is MovedBy.THREADS)
        return 4.0 + sum(better)

    figures = figures_of(rate)
    wanted = replace(MIDDLE, block_bytes=4 * MiB, mover=MovedBy.THREADS)
    assert combined(figures, MIDDLE, False) == wanted
    assert wanted in likely(figures, MIDDLE, False)
    figures.add(wanted, dict.fromkeys(JUDGED, 6.0))
    assert choose(figures, figures.engines(), MIDDLE) == wanted


def test_the_worst_share_decides() -> None:
    def rate(strategy: Strategy, operation: Operation) -> float:
        if strategy.depth == 1:  # writes at twice the speed, restores at half of it
            return 2.0 if operation is COLD else 8.0
        return 4.0

    figures = figures_of(rate)
    pool = figures.engines()
    assert score(figures, replace(MIDDLE, depth=1), pool) == 0.5
    assert score(figures, MIDDLE, pool) == 0.5
    assert choose(figures, pool, MIDDLE) == MIDDLE


def test_bytes_that_nobody_copies_are_no_setting() -> None:
    figures = figures_of(lambda s, _: 4.0 if s.is_engine else 40.0)
    assert all(each.is_engine for each in figures.engines())
    best = best_of(figures, figures.strategies(), COLD)
    assert best is not None
    assert not best.is_engine
    assert choose(figures, figures.engines(), MIDDLE) == MIDDLE


def test_without_figures_nothing_changes() -> None:
    assert choose(StudyFigures(), [], MIDDLE) == MIDDLE
    assert best_of(StudyFigures(), [MIDDLE], COLD) is None


def test_medians_and_what_moved() -> None:
    figures = StudyFigures()
    for rate in (3.0, 9.0, 4.0):
        figures.add(MIDDLE, {COLD: rate, FRESH: 4.0})
    assert figures.of(MIDDLE, COLD) == 4.0
    assert figures.moved(MIDDLE, COLD)
    assert not figures.moved(MIDDLE, FRESH)


def test_a_profile_says_what_was_chosen() -> None:
    expected = Moving(buffer_bytes=16 * MiB, queue_depth=32, backend="io_uring", copy_threads=2)
    assert moving_of(MIDDLE) == expected


def test_the_limit_of_a_storage_is_what_anybody_reached() -> None:
    plain = bytes_of(MIDDLE)
    figures = StudyFigures()
    assert rates_of(figures) is None
    figures.add(MIDDLE, {FRESH: 1.0, OVERWRITE: 2.5, COLD: 3.0})
    figures.add(plain, {FRESH: 2.0, OVERWRITE: 2.0, COLD: 4.0})
    assert rates_of(figures) == StorageRates(
        write_bytes_per_s=2_500_000_000, read_bytes_per_s=4 * 10**9
    )


def test_findings_are_sentences() -> None:
    one = replace(MIDDLE, depth=1)
    figures = StudyFigures()
    for rate in (2.0, 2.2):
        figures.add(one, {COLD: rate, FRESH: 1.0})
    figures.add(MIDDLE, {COLD: 4.2, FRESH: rate / 2})
    made = [Contrast("one", "many", (one, each), (MIDDLE, each)) for each in JUDGED]
    assert finding(figures, made) == (
        "one, as a share of many: fresh 0.91 (1.00 / 1.10 GB/s), cold 0.50 (2.10 / 4.20 GB/s)"
    )
    assert finding(StudyFigures(), made) is None
    figures.add(one, {COLD: 4.0})
    text = finding(figures, made)
    assert text is not None
    assert "cold 0.52~" in text
