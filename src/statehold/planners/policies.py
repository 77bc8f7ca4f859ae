"""What a job does when it loses a replica: the policies that a simulation compares.

    restart     all replicas restart from the newest checkpoint, once there are enough machines
    drop        the step of all is lost; the next steps have a smaller batch (torchft)
    quota       the survivors compute as many microbatches as were lost, of other data; who is lost
                comes back at a restart only (ReCoVer, arXiv 2605.11215)
    stacked     each shard is on r replicas; survivors compute what is missing; who is lost comes
                back at a restart only (SPARe, arXiv 2603.00357)
    replicated  the same stacks, but each replica computes all of its own in every step
    exact       the survivors compute the same microbatches that were lost, and repeat at most one
                reduction; who is repaired, or a spare, joins at the end of a step (statehold)

Work of a step is counted in batches: 1 is the batch of a step with all replicas.

Invariants: times are in seconds. A policy has no state: it may serve several simulations. Pure.
Not here: time, machines, checkpoints (resilience).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from statehold.planners.redundancy import Stacks, spread, stack_depth


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


@dataclass(frozen=True)
class Replicated(Stacked):
    name: str = "replicated"

    def compute_s(self, job: Job, alive: int) -> float:
        return self.stacks.redundancy * job.compute_s

    def recover(self, job: Job, step: StepLeft, empty: Set[int], lost: int) -> float:
        self._again(job, step, 0.0)
        return 0.0


def stacked(replicas: int, redundancy: int) -> Stacked:
    return Stacked(stacks=spread(replicas, redundancy))


def replicated(replicas: int, redundancy: int) -> Replicated:
    return Replicated(stacks=spread(replicas, redundancy))
