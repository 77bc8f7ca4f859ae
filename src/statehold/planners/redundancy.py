"""How many failures stacked replicas endure, what that costs, and the redundancy that is best.

SPARe (Lee et al., "SPARe: Stacked Parallelism with Adaptive Reordering", arXiv 2603.00357, ICML
2026). N replicas hold N shards of a batch. Replica i holds a stack of r of them. After k failures
each survivor computes as much of its stack as it takes to have every shard once. A shard whose r
holders are all dead ends this: the job restarts with all replicas.

Owns: the formulae of the paper, and the stacks themselves.
Invariants: times are in seconds. Failures hit each replica that is left with the same chance. Pure:
the same arguments give the same result everywhere.
Not here: several losses at once (resilience).
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from statehold.errors import UsageError

# -- what a redundancy costs -----------------------------------------------------------------------
# mu is the integral of exp(-N (k/N)^r) over k, as if shards lost their holders independently. The
# paper allows two shards to share at most one replica. docs/planning.md has the errors that were
# measured.

REDUNDANCY_MAX = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """What the choice of a redundancy depends on. Symbols of the paper:

        c(k)  = ceil(N / (N - k))                      stack_depth       shards a replica computes
        mu    = Gamma(1/r) / r * N^(1 - 1/r)           endured           failures until a restart
        Sbar  = mean over k < mu of c(k) + patch       overhead, patch   work of a step, in shards
        T_c   = T_s + sqrt(T_s^2 + 2 T_s (T_f + T_r))  period_s          from one save to the next
        A     = (1 - T_s/T) T_f / (T_f + T_r + T/2)    availability      useful share of the time
        J     = Sbar / A,  T_f = mu m                  time_over_ideal   what r minimizes

    mtbf_s: m, between two failures of the whole job. save_s: T_s. restart_s: T_r. shard_s,
    reduce_s: a step without redundancy.
    """

    mtbf_s: float
    save_s: float
    restart_s: float
    shard_s: float = 1.0
    reduce_s: float = 0.0


def stack_depth(replicas: int, lost: int) -> int:
    """c(k): the least number of shards that each survivor computes (section 4). Replicas."""
    if not 0 <= lost < replicas:
        raise UsageError("no replica is left", facts={"replicas": replicas, "lost": lost})
    return -(-replicas // (replicas - lost))


def endured(replicas: int, redundancy: int) -> float:
    """mu: the mean number of failures until a shard has no holder. That failure counts, too.

    The paper gives 1.13 % as the error against its Monte Carlo runs. Without redundancy it is 1.
    """
    _check(replicas, redundancy)
    share = 1 / redundancy
    return math.gamma(share) * share * math.pow(replicas, 1 - share)


def overhead(replicas: int, redundancy: int, costs: Costs | None = None) -> float:
    """Sbar: the shards that a replica computes in a step, on average until a restart.

    With costs, what is computed again after failures counts, too. Without, this is the bound that
    the paper finds 0.60 % below its Monte Carlo runs.
    """
    failures = range(max(1, math.floor(endured(replicas, redundancy))))
    shards = sum(stack_depth(replicas, lost) for lost in failures)
    patches = sum(patch(replicas, lost, costs) for lost in failures) if costs else 0.0
    return (shards + patches) / len(failures)


def patch(replicas: int, lost: int, costs: Costs) -> float:
    """The share of steps in which the survivors compute one more shard each, because of a failure.

    A failure has that effect if a shard of the lost replica has no other replica that computes it
    in this step. Of the c(k) replicas of a shard that do so, each is lost with the chance k/N.
    """
    depth = stack_depth(replicas, lost)
    alone = (lost / replicas) ** (depth - 1)
    failures = (depth * costs.shard_s + costs.reduce_s) / costs.mtbf_s
    return -math.expm1(-failures * (1 - (1 - alone) ** depth))


def period_s(save_s: float, uptime_s: float, restart_s: float) -> float:
    """T_c: the best time from one save to the next, the save included (after Saxena et al.)."""
    return save_s + math.sqrt(save_s**2 + 2 * save_s * (uptime_s + restart_s))


def availability(save_s: float, uptime_s: float, restart_s: float) -> float:
    """A with the best period: the share of the time that is neither saved, lost nor waited."""
    period = period_s(save_s, uptime_s, restart_s)
    if not math.isfinite(period):
        return 1.0
    useful = 1 - save_s / period if period > 0 else 1.0
    return useful * uptime_s / (uptime_s + restart_s + period / 2)


def time_over_ideal(replicas: int, redundancy: int, costs: Costs) -> float:
    """J, in steps without redundancy and failures. The paper finds it within 4 % of simulations."""
    uptime_s = endured(replicas, redundancy) * costs.mtbf_s
    ideal_s = costs.shard_s + costs.reduce_s
    step_s = overhead(replicas, redundancy, costs) * costs.shard_s + costs.reduce_s
    return step_s / ideal_s / availability(costs.save_s, uptime_s, costs.restart_s)


def best_redundancy(replicas: int, costs: Costs) -> int:
    """The redundancy with the least J, at least 2: with 1, nothing is stacked."""
    if replicas < 2:
        facts = {"replicas": replicas}
        hint = "leave the policy `stacked` out, with --policy"
        raise UsageError("one replica cannot be stacked", facts=facts, hint=hint)
    tried = range(2, min(REDUNDANCY_MAX, replicas) + 1)
    return min(tried, key=lambda each: time_over_ideal(replicas, each, costs))


def _check(replicas: int, redundancy: int) -> None:
    if not 1 <= redundancy <= replicas:
        facts = {"expected": f"1 to {replicas}, the number of replicas", "got": redundancy}
        raise UsageError("a shard cannot be on that many replicas", facts=facts)


# -- which replica holds which shards --------------------------------------------------------------
# In a step, each replica computes the first `depth` shards of its stack. Stacks never change, so
# nobody reads data that it does not hold. After any r - 1 losses each shard still has a holder.


@dataclass(frozen=True, slots=True)
class Stacks:
    """shifts: replica i holds the shards i + shift, modulo `replicas`."""

    replicas: int
    shifts: tuple[int, ...]

    @property
    def redundancy(self) -> int:
        return len(self.shifts)

    def held(self, replica: int) -> tuple[int, ...]:
        return tuple((replica + shift) % self.replicas for shift in self.shifts)

    def holders(self, shard: int) -> tuple[int, ...]:
        return tuple((shard - shift) % self.replicas for shift in self.shifts)

    def works(self, lost: Set[int]) -> bool:
        """Whether each shard has a holder that is not lost."""
        first = self.shifts[0]
        return not any(lost >= {*self.holders(each + first)} for each in lost)

    def orphans(self, replica: int, lost: Set[int], depth: int) -> int:
        """How many of the first `depth` shards of a replica are first on lost replicas only."""
        return sum(
            all((replica + own - shift) % self.replicas in lost for shift in self.shifts[:depth])
            for own in self.shifts[:depth]
        )


def spread(replicas: int, redundancy: int) -> Stacks:
    """Stacks such that any two share one shard at most, as the paper wants.

    Stacks of neighbours endure more losses that do not depend on each other, and are used where so
    many distinct differences do not fit.
    """
    if not 1 <= redundancy <= replicas:
        facts = {"expected": f"1 to {replicas}, the number of replicas", "got": redundancy}
        raise UsageError("a shard cannot be on that many replicas", facts=facts)
    shifts: list[int] = []
    differences: set[int] = set()
    for candidate in range(replicas):
        gaps = [sign * (candidate - each) % replicas for each in shifts for sign in (1, -1)]
        if len({*gaps}) == len(gaps) and differences.isdisjoint(gaps):
            shifts.append(candidate)
            differences.update(gaps)
        if len(shifts) == redundancy:
            return Stacks(replicas, tuple(shifts))
    return Stacks(replicas, tuple(range(redundancy)))
