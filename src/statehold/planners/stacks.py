"""Which replica holds which shards of a batch, if each shard is on several replicas.

SPARe (Lee et al., "SPARe: Stacked Parallelism with Adaptive Reordering", arXiv 2603.00357, ICML
2026). A batch has as many shards as the job has replicas. Replica i holds a stack of r shards. In a
step, each replica computes the first `depth` shards of its stack.

Invariants: stacks never change, so nobody reads data that it does not hold. After any r - 1 losses
each shard still has a holder. Pure: the same arguments give the same result everywhere.
Not here: who computes a shard after losses (resilience/protocol/shares), how many losses are
endured on average (redundancy), time (simulation).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from statehold.errors import UsageError


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
