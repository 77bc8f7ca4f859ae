"""Which redundancy, checkpoint interval and number of spares a job should have, for each policy.

Closed forms begin: redundancy (the redundancy that minimizes J, T_c), intervals (Daly), and as many
spares as are broken at most in 99 % of the time, if repairs come and go independently. That number
of broken machines is Poisson, with the mean repair time over the mean time between failures (after
the standby machines of ByteRobust, SOSP 2025). The simulation of the given trace refines them one
after another: spares, redundancy, interval. The choice with the most useful work for each machine
wins, spares included. So a spare has to earn its place.

Invariants: times are in seconds. The same arguments give the same plan. Pure.
Not here: the formulae (redundancy, intervals), time (simulation), what policies do (policies).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from statehold.errors import UsageError
from statehold.planners import redundancy
from statehold.planners.intervals import INTERVAL_S_MAX, best_s
from statehold.planners.policies import Drop, Job, Policy, Quota, Restart, stacked
from statehold.planners.simulation import Outcome, simulate
from statehold.planners.traces import Trace

POLICIES = ("restart", "drop", "quota", "stacked", "exact")
COVERED = 0.99  # of the time, by spares
_SPARES_MAX = 100_000
_SCALES = (0.5, 0.7, 1.4, 2.0)  # of the interval
_NEAR = (-3, -2, -1, 1, 2, 3)  # of the redundancy


@dataclass(frozen=True, slots=True)
class Rates:
    """mtbf_s: between losses of a replica, over the whole job. job_mtbf_s: between losses of the
    whole job. repair_s: the mean time until a machine is back; infinite until a restart."""

    mtbf_s: float
    job_mtbf_s: float = math.inf
    repair_s: float = math.inf

    @property
    def broken(self) -> float:
        """The mean number of machines under repair."""
        return self.repair_s / self.mtbf_s if math.isfinite(self.repair_s) else 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """interval_s: of training between two checkpoints. redundancy: replicas that hold a shard."""

    policy: str
    interval_s: float
    spares: int
    redundancy: int = 1


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """closed: what the closed forms say. chosen: after the simulation, with its outcome."""

    closed: Settings
    chosen: Settings
    outcome: Outcome


def plan(
    job: Job, rates: Rates, trace: Trace, policies: Iterable[str] = POLICIES
) -> list[PolicyChoice]:
    """The best settings of each policy on the same trace, the best policy first."""
    found = [refined(job, settings(job, rates, each), rates, trace) for each in policies]
    return sorted(found, key=lambda each: -each.outcome.goodput_allocated)


def best(choices: Iterable[PolicyChoice]) -> PolicyChoice:
    """The most useful work for each machine, among the policies that train every sample."""
    return max(
        (each for each in choices if not each.outcome.lost_batches),
        key=lambda each: each.outcome.goodput_allocated,
    )


def settings(job: Job, rates: Rates, policy: str) -> Settings:
    """What the closed forms say."""
    if policy not in POLICIES:
        facts = {"expected": ", ".join(POLICIES), "got": policy}
        raise UsageError("a policy is not known", facts=facts)
    if policy == "stacked":
        return _stacked(job, rates)
    lost = 1 / rates.job_mtbf_s
    if policy == "restart":
        lost += 1 / rates.mtbf_s
    elif policy == "quota" or not math.isfinite(rates.repair_s):  # nobody comes back
        lost += 1 / rates.mtbf_s / (job.replicas - job.min_replicas + 1)
    interval_s = min(best_s(job.save_s, lost), INTERVAL_S_MAX)
    spares = spares_for(rates.broken) if policy in ("restart", "drop", "exact") else 0
    return Settings(policy, max(interval_s, job.step_s), spares)


def spares_for(broken: float, covered: float = COVERED) -> int:
    """The least number that a Poisson variable with the mean `broken` exceeds rarely enough."""
    if broken > 0.5 * _SPARES_MAX:
        facts = {"broken": f"{broken:.3g} at a time", "limit": _SPARES_MAX // 2}
        raise UsageError("too many machines are under repair to plan for spares", facts=facts)
    spares, below = 0, 0.0
    while True:
        below += (
            math.exp(spares * math.log(broken) - broken - math.lgamma(spares + 1)) if broken else 1
        )
        if below >= covered:
            return spares
        spares += 1


def _stacked(job: Job, rates: Rates) -> Settings:
    costs = redundancy.Costs(rates.mtbf_s, job.save_s, job.restart_s, job.compute_s, job.reduce_s)
    depth = redundancy.best_redundancy(job.replicas, costs)
    mu = redundancy.endured(job.replicas, depth)
    uptime_s = 1 / (1 / rates.job_mtbf_s + 1 / (mu * rates.mtbf_s))
    interval_s = redundancy.period_s(job.save_s, uptime_s, job.restart_s) - job.save_s
    return Settings("stacked", max(min(interval_s, INTERVAL_S_MAX), job.step_s), 0, depth)


def refined(job: Job, closed: Settings, rates: Rates, trace: Trace) -> PolicyChoice:
    """Try other spares, then other redundancies, then other intervals, on the trace."""
    chosen, outcome = closed, _outcome(job, closed, trace)
    if not outcome.is_finished and not closed.redundancy > 1:
        return PolicyChoice(closed, chosen, outcome)
    for others in (_spares, _redundancies, _intervals):
        for tried in others(job, chosen, rates):
            found = _outcome(job, tried, trace)
            if found.goodput_allocated > outcome.goodput_allocated:
                chosen, outcome = tried, found
    return PolicyChoice(closed, chosen, outcome)


def _spares(job: Job, chosen: Settings, rates: Rates) -> list[Settings]:
    counts = {0, round(rates.broken / 2), round(rates.broken)} if chosen.spares else set()
    return [replace(chosen, spares=each) for each in sorted(counts - {chosen.spares})]


def _redundancies(job: Job, chosen: Settings, rates: Rates) -> list[Settings]:
    if chosen.redundancy == 1:
        return []
    near = (chosen.redundancy + each for each in _NEAR)
    return [replace(chosen, redundancy=each) for each in near if 2 <= each <= job.replicas]


def _intervals(job: Job, chosen: Settings, rates: Rates) -> list[Settings]:
    if not job.save_s:
        return []
    scaled = {max(job.step_s, chosen.interval_s * each) for each in _SCALES}
    return [replace(chosen, interval_s=each) for each in sorted(scaled - {chosen.interval_s})]


def _outcome(job: Job, chosen: Settings, trace: Trace) -> Outcome:
    return simulate(job, policy_of(job, chosen), trace, chosen.interval_s, chosen.spares)


def policy_of(job: Job, chosen: Settings) -> Policy:
    if chosen.policy == "stacked":
        return stacked(job.replicas, chosen.redundancy)
    return {"restart": Restart(), "drop": Drop(), "quota": Quota(), "exact": Policy()}[
        chosen.policy
    ]
