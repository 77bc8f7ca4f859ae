"""The closed forms of SPARe, against Monte Carlo runs and the published figures.

STATEHOLD_PLANNER_RUNS=20000: runs for each mean, 200 in the everyday suite.
"""

from __future__ import annotations

import math
import os
import random

import pytest

from statehold.errors import UsageError
from statehold.planners import policies
from statehold.planners.policies import Costs, Stacks, spread

RUNS = int(os.environ.get("STATEHOLD_PLANNER_RUNS", "200"))


def redundancy_near(replicas: int) -> int:
    """The approximation of the paper: where half of the replicas may be lost (section 5)."""
    return max(1, math.floor(math.log2(replicas) + 0.833))


def failures_until_restart(stacks: Stacks, random_: random.Random) -> int:
    """One Monte Carlo run of mu: replicas fail in random order until a shard has no holder."""
    replicas = stacks.replicas
    holders = [stacks.redundancy] * replicas
    order = random_.sample(range(replicas), replicas)
    for count, replica in enumerate(order, 1):
        for shard in stacks.held(replica):
            holders[shard] -= 1
            if not holders[shard]:
                return count
    return replicas


@pytest.mark.parametrize(
    ("replicas", "depth", "near"), [(200, 9, 0.02), (600, 8, 0.02), (1000, 9, 0.02)]
)
def test_failures_endured_are_those_of_runs(replicas: int, depth: int, near: float) -> None:
    stacks, random_ = spread(replicas, depth), random.Random(replicas)
    runs = [failures_until_restart(stacks, random_) for _ in range(RUNS)]
    noise = 3 * 0.16 / RUNS**0.5  # a run differs from the mean by 12 % to 16 %
    assert sum(runs) / RUNS == pytest.approx(policies.endured(replicas, depth), rel=near + noise)


def test_published_figures_of_600_replicas() -> None:
    assert policies.endured(600, 20) == pytest.approx(426, rel=0.01)
    assert policies.overhead(600, 20) == pytest.approx(2.34, abs=0.005)


@pytest.mark.parametrize(
    ("replicas", "depth", "published"), [(200, 9, 0.87), (600, 8, 0.939), (1000, 9, 0.9654)]
)
def test_published_availability(replicas: int, depth: int, published: float) -> None:
    uptime_s = policies.endured(replicas, depth) * 300
    assert policies.availability(60, uptime_s, 3600) == pytest.approx(published, rel=0.04)


def test_the_best_redundancy_is_where_half_may_be_lost() -> None:
    for replicas in (200, 600, 1000):
        near = redundancy_near(replicas)
        assert policies.endured(replicas, near) / replicas == pytest.approx(0.5, abs=0.03)


def test_a_published_redundancy_is_nearly_the_best_one() -> None:
    costs = Costs(mtbf_s=300, save_s=60, restart_s=3600, shard_s=64, reduce_s=2)
    for replicas, published in ((200, 9), (600, 8), (1000, 9)):
        best = policies.best_redundancy(replicas, costs)
        least = policies.time_over_ideal(replicas, best, costs)
        assert policies.time_over_ideal(replicas, published, costs) < 1.02 * least


def test_the_period_has_the_highest_availability() -> None:
    def share(period_s: float) -> float:
        return (1 - 60 / period_s) * 3e4 / (3e4 + 3600 + period_s / 2)

    best = policies.period_s(60, 3e4, 3600)
    assert policies.availability(60, 3e4, 3600) == pytest.approx(share(best))
    assert share(best) > max(share(0.98 * best), share(1.02 * best))


def test_depths_of_survivors() -> None:
    assert [policies.stack_depth(6, lost) for lost in range(6)] == [1, 2, 2, 2, 3, 6]
    with pytest.raises(UsageError, match="no replica is left"):
        policies.stack_depth(6, 6)


def test_one_replica_cannot_be_stacked() -> None:
    with pytest.raises(UsageError, match="cannot be stacked"):
        policies.best_redundancy(1, Costs(300, 60, 3600))


def test_losses_while_nobody_else_computes_a_shard_cost_more_work() -> None:
    costs = Costs(mtbf_s=300, save_s=60, restart_s=3600, shard_s=64)
    assert policies.patch(600, 0, costs) > 0.1
    assert policies.overhead(600, 8, costs) > policies.overhead(600, 8)
