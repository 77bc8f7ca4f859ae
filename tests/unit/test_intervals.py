"""The intervals that waste least: exact cases, and against brute force in a simulated job."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from statehold.planners.intervals import (
    DAY_S,
    INTERVAL_S_MAX,
    NODE_MTBF_S,
    LevelCost,
    Loss,
    best_s,
    choose,
    rates_by_level,
    rates_of,
    waste,
    young_s,
)

HOUR = 3600.0

# -- how often training fails ----------------------------------------------------------------------


def test_the_defaults_are_the_published_figures() -> None:
    assert pytest.approx(264, abs=0.1) == NODE_MTBF_S / DAY_S
    rates = rates_of(2048)
    own = 1 / DAY_S  # a job's own failures
    assert 54 * DAY_S * (rates.process + rates.node - own) == pytest.approx(419)
    assert 54 * DAY_S * rates.node == pytest.approx(321)
    assert rates_of(2048, 2 * NODE_MTBF_S).node == pytest.approx(rates.node / 2)


def test_a_level_is_needed_for_what_no_nearer_one_survives() -> None:
    rates = rates_of(100)
    near, middle, far = rates_by_level([Loss.PROCESS, Loss.NODE, Loss.CLUSTER], rates)
    assert near == rates.process
    assert middle == pytest.approx(rates.node + 0.01 * rates.process)
    assert far == pytest.approx(rates.cluster + 0.01 * (rates.process + rates.node))


def test_a_level_no_better_than_the_one_before_it_is_needed_where_that_is_bad() -> None:
    rates = rates_of(1)
    near, again = rates_by_level([Loss.NODE, Loss.NODE], rates)
    assert near == rates.process + rates.node
    assert again == pytest.approx(0.01 * near)
    assert rates_by_level([Loss.NODE], rates) == [near]


# -- the formulae ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtbf_s", "minutes"),
    [(24 * HOUR, 117), (6 * HOUR, 57), (HOUR / 4, 9.1)],
)
def test_the_examples_of_dalys_paper(mtbf_s: float, minutes: float) -> None:
    """Figures 3 to 5: a save takes five minutes."""
    assert best_s(300, 1 / mtbf_s) / 60 == pytest.approx(minutes, rel=0.01)


def test_a_save_as_long_as_the_time_between_failures() -> None:
    assert best_s(250, 1 / 100) == 100
    assert best_s(200, 1 / 100) == 100


def test_without_failures_or_cost() -> None:
    assert best_s(1.0, 0.0) == young_s(1.0, 0.0) == math.inf
    assert best_s(0.0, 0.0) == best_s(0.0, 1e-5) == 0


def test_the_best_interval_loses_as_much_in_saving_as_in_doing_again() -> None:
    level = LevelCost(2.0, 1e-5)
    assert waste(level, young_s(2.0, 1e-5)) == pytest.approx(math.sqrt(2 * 2.0 * 1e-5))
    later = LevelCost(2.0, 1e-5, busy_s=30.0, restart_s=70.0)
    assert waste(later, 100.0) - waste(level, 100.0) == pytest.approx(1e-5 * 100)


# -- the choice ------------------------------------------------------------------------------------


def test_what_is_free_is_done_at_every_step() -> None:
    assert choose([LevelCost(0.0, 1e-5), LevelCost(0.0, 1e-6)], 0.3) == [1, 1]


def test_intervals_are_nested_and_grow() -> None:
    levels = [LevelCost(0.1, 1e-5), LevelCost(5.0, 4e-6), LevelCost(60.0, 1e-7)]
    near, middle, far = choose(levels, 1.0)
    assert near == pytest.approx(young_s(0.1, 1e-5), rel=0.01)
    assert middle == pytest.approx(young_s(5.0, 4e-6), rel=0.05)
    assert far == pytest.approx(young_s(60.0, 1e-7), rel=0.05)
    assert middle % near == far % middle == 0


def test_levels_of_which_the_farther_one_wants_more_go_together() -> None:
    levels = [LevelCost(4.0, 1e-6), LevelCost(1.0, 1e-4)]
    near, far = choose(levels, 1.0)
    assert near == far == pytest.approx(best_s(5.0, 1.01e-4), abs=1)


def test_a_level_is_not_asked_for_more_than_it_can_take() -> None:
    near, far = choose([LevelCost(0.0, 1e-5), LevelCost(0.0, 1e-5, busy_s=9.5)], 1.0)
    assert (near, far) == (1, 10)
    near, far = choose([LevelCost(2.0, 1e-4), LevelCost(0.0, 1e-3, busy_s=1e3)], 1.0)
    assert (near, far) == (round(best_s(2.0, 1e-4)), 6 * near)


def test_a_level_that_nothing_needs_gets_a_step_a_day() -> None:
    assert choose([LevelCost(1.0, 0.0)], 1.0) == [INTERVAL_S_MAX]


def test_fixed_cadences_bound_the_nearer_ones() -> None:
    dear = LevelCost(1.0, 1e-9)
    hour = LevelCost(1.0, 1e-5, fixed_s=HOUR)
    assert choose([dear, hour], 1.0) == [HOUR, HOUR]
    assert choose([hour, LevelCost(0.0, 1.0)], 1.0) == [HOUR, HOUR]
    assert choose([hour, dear, LevelCost(1.0, 1e-5, fixed_s=2.5 * HOUR)], 1.0) == [
        HOUR, 2 * HOUR, 2.5 * HOUR
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_no_other_pattern_of_three_levels_wastes_less(seed: int) -> None:
    """Brute force over nested whole intervals, with the first-order waste itself."""
    random_ = random.Random(seed)
    levels = [LevelCost(10 ** random_.uniform(-2, 1), 10 ** random_.uniform(-5, -2)) for _ in "123"]

    def total(steps: tuple[int, ...]) -> float:
        return sum(waste(level, n * 10.0) for level, n in zip(levels, steps, strict=True))

    times = [*range(1, 12), 15, 20, 30, 50, 80, 120, 200, 300]
    patterns = [(a, a * b, a * b * c) for a, b, c in itertools.product(times, repeat=3)]
    best = min(map(total, patterns))
    chosen = total(tuple(choose(levels, 10.0)))
    assert chosen <= 1.03 * best, f"seed {seed}: {levels}"


# -- a simulated job -------------------------------------------------------------------------------


def simulated_waste(
    levels: list[LevelCost], steps: tuple[int, int], step_s: float, failures: int, seed: int
) -> float:
    """The share of the time that a job with two levels loses, event by event: every step takes
    step_s, every save and every copy its cost, and failures come when they come. The position is
    counted in saves since the last one that went to the far level."""
    random_ = random.Random(seed)
    near, far = levels
    times = steps[1] // steps[0]
    save_s = steps[0] * step_s + near.cost_s
    cycle_s = times * save_s + far.cost_s
    at, done, spent_s = 0, 0, 0.0
    for _ in range(failures):
        left_s = random_.expovariate(near.rate + far.rate)
        spent_s += left_s + near.restart_s
        left_s += at * save_s  # as if this cycle had begun without a failure
        cycles, rest_s = divmod(left_s, cycle_s)
        now = min(int(rest_s / save_s), times)
        done += int(cycles) * times + now - at
        at = now
        if random_.random() < far.rate / (near.rate + far.rate):
            done, at = done - at, 0
    return 1 - done * steps[0] * step_s / spent_s


@pytest.mark.thorough
@pytest.mark.parametrize(
    "levels",
    [
        [LevelCost(0.5, 1 / 7200), LevelCost(8.0, 1 / 40_000)],  # 1 save in 85 s, 1 copy in 800 s
        [LevelCost(10.0, 1 / 3000), LevelCost(60.0, 1 / 9000)],  # saves that are long: Daly's terms
        [LevelCost(6.0, 1 / 90_000), LevelCost(1.0, 1 / 3000)],  # levels that go together
    ],
)
def test_the_choice_is_within_a_few_percent_of_the_best_of_a_sweep(
    levels: list[LevelCost],
) -> None:
    """Over the same failures, the chosen pattern wastes at most 3 % more than the best of all."""
    step_s = 2.0
    near, far = choose(levels, step_s)
    sweep = [
        (n, n * times)
        for n in sorted({max(1, round(near * scale)) for scale in (0.35, 0.5, 0.7, 1, 1.4, 2, 3)})
        for times in (1, 2, 3, 5, 8, 12, 20, 40)
    ]
    wasted = {
        steps: simulated_waste(levels, steps, step_s, 8_000, seed=7)
        for steps in [*sweep, (near, far)]
    }
    best = min(wasted, key=lambda steps: wasted[steps])
    found = f"chosen {near, far}: {wasted[near, far]:.4f}; best {best}: {wasted[best]:.4f}"
    assert wasted[near, far] <= 1.03 * wasted[best], found
    assert max(wasted.values()) > 1.3 * wasted[best], "the sweep is too narrow to tell anything"
