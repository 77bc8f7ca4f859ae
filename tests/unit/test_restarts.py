"""What restarts from checkpoints cost: Young, Daly, Aupy and Benoit; the failures of Llama 3."""

from __future__ import annotations

import math
import random

import pytest

from statehold.errors import UsageError
from statehold.planners import intervals
from statehold.planners.intervals import LevelCost
from support import restarts

MTBF_S, SAVE_S, DOWN_S, READ_S = 20_000.0, 60.0, 30.0, 120.0


def expected_s(period_s: float) -> float:
    return restarts.expected_s(1e6, period_s, SAVE_S, MTBF_S, DOWN_S, READ_S)


def test_llama_3_fails_every_three_hours() -> None:
    nodes = 16_384 / 8
    node_s = intervals.NODE_MTBF_S
    per_thousand_days = 1000 * intervals.DAY_S / node_s
    gpu_hours = 8 * node_s / 3600
    assert node_s / nodes == pytest.approx(3.09 * 3600, rel=0.002)
    assert per_thousand_days == pytest.approx(3.79, rel=0.002)
    assert gpu_hours == pytest.approx(50_700, rel=0.001)


def test_first_orders_are_young_and_daly() -> None:
    assert intervals.young_s(SAVE_S, 1 / MTBF_S) == pytest.approx(math.sqrt(2 * 60 * 20_000))
    assert restarts.first_order_s(SAVE_S, MTBF_S, DOWN_S, READ_S) == pytest.approx(
        math.sqrt(2 * 60 * 20_150) + 60
    )


def test_the_exact_period_takes_the_least_time() -> None:
    best = restarts.exact_s(SAVE_S, MTBF_S)
    assert expected_s(best) < min(expected_s(0.99 * best), expected_s(1.01 * best))


@pytest.mark.parametrize("save_s", [1.0, 60.0, 600.0, 3000.0])
def test_closed_forms_take_at_most_two_percent_more(save_s: float) -> None:
    def time_s(period_s: float) -> float:
        return restarts.expected_s(1e6, period_s, save_s, MTBF_S, DOWN_S, READ_S)

    least = time_s(restarts.exact_s(save_s, MTBF_S))
    assert time_s(intervals.best_s(save_s, 1 / MTBF_S) + save_s) < 1.001 * least
    assert time_s(restarts.first_order_s(save_s, MTBF_S, DOWN_S, READ_S)) < 1.02 * least


def test_the_expected_time_is_that_of_runs() -> None:
    random_, period_s, taken_s = random.Random(5), 4000.0, 0.0
    periods = 20_000
    for _ in range(periods):
        while (failure_s := random_.expovariate(1 / MTBF_S)) < period_s:
            taken_s += failure_s + DOWN_S
            while (failure_s := random_.expovariate(1 / MTBF_S)) < READ_S:
                taken_s += failure_s + DOWN_S
            taken_s += READ_S
        taken_s += period_s
    work_s = periods * (period_s - SAVE_S)
    formula = restarts.expected_s(work_s, period_s, SAVE_S, MTBF_S, DOWN_S, READ_S)
    assert taken_s == pytest.approx(formula, rel=0.02)


def test_the_first_order_waste_is_near_the_exact_one() -> None:
    period_s = restarts.exact_s(SAVE_S, MTBF_S)
    exact = 1 - 1e6 / expected_s(period_s)
    assert restarts.waste(period_s, SAVE_S, MTBF_S, DOWN_S, READ_S) == pytest.approx(exact, rel=0.1)


def test_levels_lose_what_each_loses_alone() -> None:
    levels = [LevelCost(cost_s=1, rate=1 / 3600), LevelCost(cost_s=60, rate=1 / 86_400)]
    best = sum(intervals.loss(each, intervals.young_s(each.cost_s, each.rate)) for each in levels)
    assert restarts.multilevel_waste(levels) == pytest.approx(best)


def test_a_period_without_time_for_work_is_refused() -> None:
    with pytest.raises(UsageError, match="no time for work"):
        expected_s(SAVE_S)
