"""What a job does when it loses a replica: the policies that a simulation compares.

    restart     all replicas restart from the newest checkpoint, once there are enough machines
    drop        the step of all is lost; the next steps have a smaller batch (torchft)
    quota       the survivors compute as many microbatches as were lost, of other data; who is lost
                comes back at a restart only (ReCoVer, arXiv 2605.11215)
    stacked     each shard is on r replicas; survivors compute what is missing; who is lost comes
                back at a restart only (SPARe, arXiv 2603.00357)
    exact       the survivors compute the same microbatches that were lost, and repeat at most one
                reduction; who is repaired, or a spare, joins at the end of a step (statehold)

Work of a step is counted in batches: 1 is the batch of a step with all replicas.

SPARe is Lee et al., "SPARe: Stacked Parallelism with Adaptive Reordering" (ICML 2026). N replicas
hold N shards of a batch. Replica i holds a stack of r of them. After k failures each survivor
computes as much of its stack as it takes to have every shard once. A shard whose r holders are all
dead ends this: the job restarts with all replicas.

Owns: the policies; the formulae of SPARe (how many failures stacks endure, what that costs, and the
redundancy that is best), and the stacks themselves.
Invariants: times are in seconds. A policy has no state: it may serve several simulations. Failures
hit each replica that is left with the same chance. Pure: the same arguments give the same result
everywhere.
Not here: time, machines, checkpoints, and several losses at once (resilience).
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
    _check(replicas, redundancy)
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


# -- jobs and policies -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, as far as failures matter.

    steps: to train. compute_s, reduce_s: of a step with all replicas. microbatches: of a step, all
        replicas together. save_s: how long a checkpoint stops the training. restart_s: from a
        failure until all replicas train again from the checkpoint.
    detect_s: until survivors know of a loss and have regrouped. join_s: to bring a new replica up
        to date, while the others train. min_replicas: with fewer, the job restarts.
    """

    replicas: int
    steps: int
    compute_s: float
    reduce_s: float
    save_s: float
    restart_s: float
    microbatches: int
    detect_s: float = 1.0
    join_s: float = 30.0
    min_replicas: int = 1

    @property
    def step_s(self) -> float:
        return self.compute_s + self.reduce_s

    @property
    def ideal_s(self) -> float:
        return self.steps * self.step_s

    @property
    def microbatch_s(self) -> float:
        return self.compute_s * self.replicas / self.microbatches

    def shared_s(self, alive: int) -> float:
        """The compute time of a batch, if `alive` replicas share its microbatches evenly.

        Only the number that the busiest replica gets more than with all replicas adds to the time.
        """
        more = -(-self.microbatches // alive) - -(-self.microbatches // self.replicas)
        return self.compute_s + more * self.microbatch_s


@dataclass(slots=True)
class StepLeft:
    """What is left of a step: its compute time, work added by failures, its reduction."""

    compute_s: float
    reduce_s: float
    added_s: float = 0.0
    spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        return self.compute_s + self.added_s + self.reduce_s

    def spend(self, s: float) -> None:
        self.spent_s += s
        for name in ("compute_s", "added_s", "reduce_s"):
            left_s = getattr(self, name)
            setattr(self, name, max(0.0, left_s - s))
            s = max(0.0, s - left_s)


@dataclass(frozen=True)
class Policy:
    """Survivors share the batch of a step; one of them is enough.

    rejoins: replicas come back between restarts. drops: a failure ends the step for all.
    """

    name: str = "exact"
    rejoins: bool = True
    drops: bool = False

    def works(self, job: Job, empty: Set[int], lost: int | None = None) -> bool:
        """Whether the replicas that are not in `empty` can go on. lost: the newest one there."""
        return job.replicas - len(empty) >= job.min_replicas

    def compute_s(self, job: Job, alive: int) -> float:
        return job.shared_s(alive)

    def batches(self, job: Job, alive: int) -> float:
        """What a step trains."""
        return 1.0

    def unused(self, job: Job, alive: int) -> float:
        """The batches of samples in each step that are never trained, while replicas are lost."""
        return 0.0

    def recover(self, job: Job, step: StepLeft, empty: Set[int], lost: int) -> float:
        """Add what a loss costs to a step that goes on. Returns the batches computed again."""
        alive = job.replicas - len(empty)
        microbatches = -(-job.microbatches // (alive + 1))
        self._again(job, step, -(-microbatches // alive) * job.microbatch_s)
        return microbatches / job.microbatches

    @staticmethod
    def _again(job: Job, step: StepLeft, added_s: float) -> None:
        """After the loss of a replica; a reduction that is under way begins again."""
        step.added_s += job.detect_s + added_s
        step.reduce_s = job.reduce_s


@dataclass(frozen=True)
class Restart(Policy):
    name: str = "restart"
    rejoins: bool = False

    def works(self, job: Job, empty: Set[int], lost: int | None = None) -> bool:
        return not empty


@dataclass(frozen=True)
class Drop(Policy):
    """torchft: replica groups have shards of the data of their own, and nobody reads the shard of a
    group that is down."""

    name: str = "drop"
    drops: bool = True

    def compute_s(self, job: Job, alive: int) -> float:
        return job.compute_s

    def batches(self, job: Job, alive: int) -> float:
        return alive / job.replicas

    def unused(self, job: Job, alive: int) -> float:
        return 1 - alive / job.replicas


@dataclass(frozen=True)
class Quota(Policy):
    """ReCoVer: shards of the data are fixed at the start, so a lost replica's is not read again."""

    name: str = "quota"
    rejoins: bool = False

    def unused(self, job: Job, alive: int) -> float:
        return 1 - alive / job.replicas

    def recover(self, job: Job, step: StepLeft, empty: Set[int], lost: int) -> float:
        super().recover(job, step, empty, lost)
        return 0.0


_ALONE = Stacks(1, (0,))


@dataclass(frozen=True)
class Stacked(Policy):
    """SPARe. Survivors compute c(k) shards each. It is the least that suffices, and reordering
    stacks reaches it or nearly so. If nobody else has computed a shard of a lost replica in this
    step, a survivor computes one more.

    stacks: reordering is not followed, replicas compute the first shards of their stacks.
    """

    name: str = "stacked"
    rejoins: bool = False
    stacks: Stacks = _ALONE

    def works(self, job: Job, empty: Set[int], lost: int | None = None) -> bool:
        if lost is None:
            return self.stacks.works(empty)
        return not self.stacks.orphans(lost, empty, self.stacks.redundancy)

    def compute_s(self, job: Job, alive: int) -> float:
        return stack_depth(job.replicas, job.replicas - alive) * job.compute_s

    def recover(self, job: Job, step: StepLeft, empty: Set[int], lost: int) -> float:
        """Losses while stacks are computed share one shard of work; later ones need their own."""
        depth = stack_depth(job.replicas, len(empty) - 1)
        missing = self.stacks.orphans(lost, empty, depth)
        is_shared = step.compute_s > 0 and step.added_s >= job.compute_s
        self._again(job, step, job.compute_s if missing and not is_shared else 0.0)
        return missing / job.replicas


def stacked(replicas: int, redundancy: int) -> Stacked:
    return Stacked(stacks=spread(replicas, redundancy))
