"""every="auto": what is measured in a run of which the costs are known, and what is made of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from statehold import Directory, Memory, ObjectStore
from statehold.checkpoint.levels.specs import Level
from statehold.errors import UsageError
from statehold.options import Options
from statehold.planners.intervals import LevelCost, loss, rates_by_level, rates_of, young_s
from support.simulated_run import Costs, SimulatedRun

OFTEN = Options(nodes=512, node_mtbf="20d")


def rates(levels: list[Level], options: Options = OFTEN) -> list[float]:
    failures = rates_of(options.nodes or 1, options.node_mtbf_s)
    return rates_by_level([level.survives for level in levels], failures)


def run_of(levels: list[Level], costs: list[Costs], **other: Any) -> SimulatedRun:
    options = {"step_s": 1.0, "noise": 0.02, "seed": 1, "options": OFTEN, **other}
    return SimulatedRun(levels, costs, **options)


THREE = [Memory(every="auto"), Directory(every="auto"), ObjectStore("s3://b/p", every="auto")]
THREE_COSTS = [
    Costs(0.6, slower=0.1, blocked_s=0.03, gate_s=0.02),
    Costs(20.0, slower=0.10),
    Costs(90.0, slower=0.05),
]


@pytest.mark.parametrize("seed", range(3))
def test_it_ends_within_a_few_percent_of_the_best_of_all_cadences(seed: int) -> None:
    """The waste of what it came to, with the true costs, against a sweep of fixed cadences."""
    run = run_of(THREE, THREE_COSTS, seed=seed)
    run.train(6000)
    true = [
        LevelCost(cost.lost_s(), rate) for cost, rate in zip(THREE_COSTS, rates(THREE), strict=True)
    ]

    def lost(steps: Any) -> float:
        return sum(loss(level, n * run.step_s) for level, n in zip(true, steps, strict=True))

    times = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    sweep = ((a, a * b, a * b * c) for a, b, c in itertools.product(times, repeat=3))
    best = min(map(lost, sweep))
    chosen = lost(run.intervals)
    assert chosen <= 1.05 * best, f"{run.intervals}: {chosen:.5f}, best {best:.5f}"
    assert lost([1, 1, 1]) > 10 * best


def test_what_is_free_is_saved_at_every_step() -> None:
    run = run_of(THREE[:1], [Costs(0.4, blocked_s=0.0005)])
    run.train(400)
    assert run.saved[-300:] == list(range(101, 401))
    interval = run.schedule.interval("memory")
    assert interval is not None
    assert interval.cost_s == 0
    assert "every step" in str(interval)
    assert "is free" in str(interval)


def test_what_save_blocks_decides_how_often() -> None:
    run = run_of(THREE[:1], [Costs(0.4, blocked_s=0.1, gate_s=0.1)])
    run.train(3000)
    [rate] = rates(THREE[:1])
    assert run.intervals[0] == pytest.approx(young_s(0.2, rate), rel=0.1)


def test_copies_on_other_hosts_are_a_cost_of_their_level() -> None:
    levels: list[Level] = [Memory(every="auto", copies=1)]
    costs = [Costs(0.5, blocked_s=0.01), Costs(6.0, slower=0.2)]
    run = run_of(levels, costs)
    run.train(6000)
    true = LevelCost(sum(cost.lost_s() for cost in costs), rates(levels)[0])
    best = min(loss(true, float(steps)) for steps in range(1, 2000))
    assert loss(true, float(run.intervals[0])) < 1.1 * best


def test_a_slower_storage_is_noticed_and_a_faster_one_too() -> None:
    run = run_of(THREE[:1], [Costs(0.4, blocked_s=0.05)])
    run.train(3000)
    before = run.intervals[0]
    run.costs = [Costs(0.4, blocked_s=0.8)]
    run.train(12_000)
    slow = run.intervals[0]
    run.costs = [Costs(0.4, blocked_s=0.05)]
    run.train(12_000)
    assert slow == pytest.approx(4 * before, rel=0.15)
    assert run.intervals[0] == pytest.approx(before, rel=0.4)  # what is worth no change stays


def test_noise_changes_nothing() -> None:
    """It does not flap: an INFO line for each change, and there are few in a long run."""
    run = run_of(THREE, THREE_COSTS, noise=0.1)
    run.train(4000)
    told = len(run.lines)
    run.train(8000)
    assert told >= 3
    assert len(run.lines) - told <= 3, "\n".join(run.lines)


def test_steps_that_become_faster_or_slower_are_no_cost() -> None:
    """What there is to compare with is of other times then, and found anew."""
    run = run_of(THREE[:1], [Costs(0.4, blocked_s=0.0005)])
    for step_s in (1.0, 3.0, 0.8):
        run.step_s = step_s
        run.train(600)
        assert run.intervals == [1], f"{step_s} s a step: {run.lines}"


def test_levels_with_a_cadence_of_their_own_are_left_alone() -> None:
    levels = [Memory(every="auto"), Directory(every="10min"), ObjectStore("s3://b/p", every=5000)]
    run = run_of(levels, [Costs(0.4, blocked_s=2.0), Costs(5.0, 0.1), Costs(5.0)])
    run.train(3000)
    assert run.intervals[1:] == [1, 1]  # nobody has told them
    assert 1 < run.intervals[0] <= 600
    assert run.schedule.interval("directory") is None


def test_a_time_at_the_first_level_alone_is_time() -> None:
    run = run_of([Directory(every="30s")], [Costs(0.4)], noise=0.0)
    run.train(100)
    assert run.saved == [1, 31, 61, 91]


def test_a_change_says_why() -> None:
    run = run_of(THREE[:1], [Costs(0.4, blocked_s=0.2)])
    run.train(500)
    assert "level memory gets a step every" in run.lines[0]
    assert "costs 200 ms" in run.lines[0]
    interval = run.schedule.interval("memory")
    assert interval is not None
    assert run.shown[-1] == interval.seconds
    assert "% of the time is lost" in run.lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 0}, "nodes must be an integer from 1 to"),
        ({"nodes": 1.5}, "nodes must be an integer from 1 to"),
        ({"node_mtbf": "long"}, "node_mtbf must be a time"),
        ({"node_mtbf": 3600}, "node_mtbf must be a time"),
        ({"node_mtbf": "0d"}, "node_mtbf must be a time"),
    ],
)
def test_rates_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options(**options)


def test_rates_are_the_users() -> None:
    """A quarter of the failures: twice the interval; the hosts of the ranks are the nodes."""
    found = []
    for mtbf, hosts in (("20d", 512), ("80d", 512), ("80d", 2048)):
        options = Options(node_mtbf=mtbf)
        costs = [Costs(0.4, blocked_s=0.2)]
        run = run_of([Directory(every="auto")], costs, options=options, hosts=hosts)
        run.train(3000)
        found.append(run.intervals[0])
    assert found[1] == pytest.approx(2 * found[0], rel=0.15)
    assert found[2] == pytest.approx(found[0], rel=0.15)
