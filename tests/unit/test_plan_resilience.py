"""Policies under one trace of failures: the simulation against closed forms and published tables.

STATEHOLD_PLANNER_TABLES=all: every row of the published table, not only one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Set

import pytest

from statehold.errors import UsageError
from statehold.planners import policies, traces
from statehold.planners.policies import (
    Drop,
    Job,
    Policy,
    Quota,
    Restart,
    Stacked,
    StepLeft,
    stacked,
)
from statehold.planners.resilience import Outcome, Rates, plan, settings, simulate, spares_for
from statehold.planners.traces import DrawnTrace, Failure, Given
from support import restarts

pytest.importorskip("simpy")
JOB = Job(8, 100, 60.0, 4.0, 30.0, 600.0, 32, detect_s=1.0, join_s=100.0)

WEIBULL = 0.78  # the shape of failures of nodes on Titan, which SPARe uses


def after(*failures: Failure) -> Given:
    """These, and no others before the end of the job."""
    return Given(failures, 1e9)


def one_loss(policy: Policy, repair_s: float = 1e8) -> Outcome:
    """Replica 3 is lost 30 s into the third step of ten."""
    job = dataclasses.replace(JOB, steps=10)
    return simulate(job, policy, after(Failure(2 * 64 + 30, 3, repair_s)))


def test_without_failures_only_saves_take_time() -> None:
    out = simulate(JOB, Policy(), after(Failure(1e8, 0)), interval_s=640)
    assert (out.saving_s, out.total_s, out.slower_s) == (9 * 30, 6400 + 270, 0)


def test_restart_goes_back_to_the_newest_checkpoint() -> None:
    job = dataclasses.replace(JOB, steps=10)
    out = simulate(job, Restart(), after(Failure(128 + 30 + 64 + 18, 3, 0)), interval_s=128)
    assert (out.restarts, out.down_s, out.lost_s, out.saving_s) == (1, 600, 64 + 18, 4 * 30)
    assert out.total_s == 640 + 600 + 64 + 18 + 4 * 30


def test_drop_loses_the_step_of_all_and_the_samples_of_the_lost() -> None:
    out = one_loss(Drop())
    assert out.lost_s == 30 + 1
    assert out.lost_batches == 1 + 10 / 8  # its step, and one shard of each of ten more
    assert out.again_batches == 0


def test_quota_finishes_the_step_and_never_reads_a_shard() -> None:
    out = one_loss(Quota())
    assert (out.lost_s, out.restarts) == (0, 0)
    assert out.lost_batches > 0


def test_exact_computes_what_was_lost_again_and_loses_nothing() -> None:
    out = one_loss(Policy())
    assert (out.lost_s, out.lost_batches, out.restarts) == (0, 0, 0)
    assert out.again_batches == pytest.approx(4 / 32)
    assert out.recovery_s == pytest.approx(1 + 15)  # one more microbatch each
    assert out.total_s == pytest.approx(640 + 16 + 7 * 15)  # seven replicas have five at most


def test_exact_takes_a_repaired_machine_back() -> None:
    out = one_loss(Policy(), repair_s=50)
    assert out.total_s == pytest.approx(640 + 16 + 2 * 15)  # for two steps there are seven


def test_stacked_restarts_when_a_shard_has_no_holder() -> None:
    policy = stacked(8, 2)
    holders = sorted(policy.stacks.holders(0))
    failures = [Failure(100.0 + 200 * n, replica) for n, replica in enumerate(holders)]
    assert simulate(JOB, policy, after(failures[0])).restarts == 0
    assert simulate(JOB, policy, after(*failures)).restarts == 1


def test_the_time_of_a_run_is_the_sum_of_its_parts() -> None:
    trace = DrawnTrace(8, 900, 1, repair_s=2000)
    for policy in (Drop(), Quota(), stacked(8, 3), Policy()):
        out = simulate(JOB, policy, trace, 1000, spares=1)
        known_s = out.ideal_s + out.saving_s + out.down_s + out.lost_s + out.recovery_s
        assert out.failures > 3
        assert out.total_s == pytest.approx(known_s + out.slower_s)


def test_a_repair_may_take_no_time() -> None:
    trace = DrawnTrace(8, 900, 1, repair_s=0)
    assert {each.repair_s for each, _ in zip(trace, range(9), strict=False)} == {0.0}


def test_restarts_take_the_time_of_the_closed_form() -> None:
    """Exponential failures; those during a restart do not prolong it."""
    job = dataclasses.replace(JOB, steps=20_000, restart_s=60.0)
    interval_s = 64.0 * 15
    out = simulate(job, Restart(), DrawnTrace(8, 10_000, 2), interval_s)
    formula = restarts.expected_s(job.ideal_s, interval_s + 30, 30, 10_000, 60, 0)
    assert out.total_s == pytest.approx(formula, rel=0.02)


@dataclasses.dataclass(frozen=True)
class Replicated(Stacked):
    """The same stacks, but each replica computes all of its own in every step."""

    name: str = "replicated"

    def compute_s(self, job: Job, alive: int) -> float:
        return self.stacks.redundancy * job.compute_s

    def recover(self, job: Job, step: StepLeft, empty: Set[int], lost: int) -> float:
        self._again(job, step, 0.0)
        return 0.0


# The paper is more precise than what is known of its simulation: docs/planning.md.
PUBLISHED = [
    (200, 3, 6.07, 0.6174, 0.15), (200, 9, 2.92, 0.87, 0.06), (600, 3, 4.27, 0.7989, 0.06),
    (600, 8, 2.49, 0.939, 0.04), (1000, 3, 3.88, 0.8441, 0.06), (1000, 9, 2.34, 0.9654, 0.04),
]  # fmt: skip
ROWS = PUBLISHED if os.environ.get("STATEHOLD_PLANNER_TABLES") == "all" else PUBLISHED[3:4]


@pytest.mark.parametrize(("replicas", "depth", "time", "availability", "near"), ROWS)
def test_published_tables(
    replicas: int, depth: int, time: float, availability: float, near: float
) -> None:
    kind = Replicated if depth == 3 else Stacked
    policy = kind(stacks=policies.spread(replicas, depth))
    uptime_s = policies.endured(replicas, depth) * 300
    interval_s = policies.period_s(60, uptime_s, 3600) - 60
    job = Job(replicas, 10_000, 64, 2, 60, 3600, replicas, detect_s=0.1)
    out = simulate(
        job, policy, DrawnTrace(replicas, 300, 1, WEIBULL, 75_000 // replicas), interval_s
    )
    assert out.time_over_ideal == pytest.approx(time, rel=near)
    assert out.availability == pytest.approx(availability, rel=near)


def test_a_trace_gives_the_same_failures_again() -> None:
    for trace in (
        DrawnTrace(8, 900, 1, repair_s=50),
        DrawnTrace(8, 900, 1, WEIBULL, 4, job_mtbf_s=5000),
    ):
        first, second = (list(itertools.islice(trace, 50)) for _ in range(2))
        assert first == second
        assert first == sorted(first, key=lambda each: each.at_s)


def test_drawn_failures_have_their_mean() -> None:
    for shape in (1.0, WEIBULL):
        *_, last = itertools.islice(DrawnTrace(8, 900, 3, shape), 20_000)
        assert last.at_s / 20_000 == pytest.approx(900, rel=0.03)


def test_a_given_trace_is_repeated() -> None:
    text = "time_s,replica,repair_s\n20,,\n10,3,5\n"
    found = list(itertools.islice(traces.parse(text), 4))
    assert [each.at_s for each in found] == [10, 20, 30, 40]
    assert [each.replica for each in found] == [3, None, 3, None]
    assert traces.parse(f"\ufeff{text}") == traces.parse(text)  # as spreadsheets save it
    document = {"failures": [{"time_s": 10, "replica": 3}], "duration_s": 100}
    assert traces.parse(json.dumps(document)).mtbf_s() == 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n",
        "[",
        "[" * 100_000,
        "[1]",
        "[]",
        '[{"time_s": -1}]',
        '[{"time_s": 0}]',
        "time_s,replica\nx,1",
        'time_s,replica\n"' + "1" * 200_000,
    ],
)
def test_a_trace_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a trace"):
        traces.parse(text)


def test_a_plan_keeps_the_best_first() -> None:
    found = plan(JOB, Rates(900, repair_s=2000), DrawnTrace(8, 900, 1, repair_s=2000))
    shares = [each.outcome.goodput_allocated for each in found]
    assert shares == sorted(shares, reverse=True)
    assert {each.chosen.policy for each in found} == {
        "restart",
        "drop",
        "quota",
        "stacked",
        "exact",
    }


def test_spares_cover_a_poisson_number() -> None:
    assert [spares_for(broken) for broken in (0, 0.01, 1, 10)] == [0, 0, 4, 18]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="not known"):
        settings(JOB, Rates(900), "hope")
