"""Which replica holds and computes which shards of a batch, if each shard is on several replicas.

SPARe (Lee et al., "SPARe: Stacked Parallelism with Adaptive Reordering", arXiv 2603.00357, ICML
2026). A batch has as many shards as the job has replicas. Replica i holds a stack of r shards. In a
step, each replica computes the first `depth` shards of its stack. After losses the survivors
reorder their stacks, so that each shard is computed again, at the least depth that suffices.

`arrange(stacks, lost)` chooses the order of the stacks; None means that a shard has no holder left,
so the job restarts. `Arrangement.missing(lost)` says which shards nobody else computes in a step.
`arrange` with copies=2 lets two replicas compute each shard: then one loss leaves none missing.

Invariants:
- Stacks never change; only their order does. So nobody reads data that it does not hold.
- An arrangement covers each shard `copies` times, on as many replicas. Its depth is at least
  ceil(copies * N / (N - k)) after k losses, at most r, and the least depth that is possible.
- A survivor keeps computing what it computed before, except where that stands in the way.
- Any r - 1 losses leave an arrangement. Pure: the same arguments give the same result everywhere.
Not here: how many losses are endured on average (redundancy), time (simulation).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
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


@dataclass(frozen=True, slots=True)
class Arrangement:
    """orders: the stack of each survivor, what it computes first. depth: how much of it."""

    depth: int
    orders: dict[int, tuple[int, ...]]

    def computes(self, replica: int) -> tuple[int, ...]:
        return self.orders[replica][: self.depth]

    def missing(self, lost: Iterable[int]) -> list[int]:
        """The shards that nobody computes in a step in which these survivors are lost, too."""
        gone = {*lost}
        wanted = {shard for each in self.orders for shard in self.computes(each)}
        left = {shard for each in self.orders if each not in gone for shard in self.computes(each)}
        return sorted(wanted - left)


def arrange(
    stacks: Stacks, lost: Set[int], before: Arrangement | None = None, copies: int = 1
) -> Arrangement | None:
    """The order of the stacks of those who are not lost; None if a shard has too few holders.

    before: the arrangement until now. Without it, the stacks are as they were at the start.
    """
    alive = [each for each in range(stacks.replicas) if each not in lost]
    if not alive:
        return None
    orders = {each: before.orders[each] if before else stacks.held(each) for each in alive}
    least = -(-copies * stacks.replicas // len(alive))
    for depth in range(least, stacks.redundancy + 1):
        share = _Matching(stacks, orders, depth, copies)
        if all(share.cover(shard) for shard in range(stacks.replicas)):
            found = {each: share.reordered(each) for each in alive}
            return Arrangement(depth, found)
    return None


class _Matching:
    """Survivors and the shards that they are needed for: at most `depth` of each, by augmenting
    paths. It begins with what survivors compute already."""

    def __init__(
        self, stacks: Stacks, orders: dict[int, tuple[int, ...]], depth: int, copies: int
    ) -> None:
        self._stacks, self._orders, self._depth, self._copies = stacks, orders, depth, copies
        self._needed: dict[int, list[int]] = {each: [] for each in orders}
        self._by: list[set[int]] = [set() for _ in range(stacks.replicas)]
        for place in range(depth):
            for replica, order in orders.items():
                if len(self._by[order[place]]) < copies:
                    self._add(replica, order[place])

    def cover(self, shard: int) -> bool:
        return all(self._augment(shard) for _ in range(self._copies - len(self._by[shard])))

    def reordered(self, replica: int) -> tuple[int, ...]:
        """The order changes only if a shard that the replica is needed for is too deep in it."""
        order, needed = self._orders[replica], self._needed[replica]
        if {*needed} <= {*order[: self._depth]}:
            return order
        first = [each for each in order[: self._depth] if each in needed]
        first += [each for each in needed if each not in first]
        return (*first, *(each for each in order if each not in first))

    def _augment(self, shard: int) -> bool:
        """One more replica for a shard, by the shortest chain of survivors that hand over one."""
        came_from: dict[int, tuple[int, int | None]] = {}  # replica: the shard it takes, and whose
        waiting: deque[tuple[int, int | None]] = deque([(shard, None)])
        while waiting:
            wanted, giver = waiting.popleft()
            for replica in self._stacks.holders(wanted):
                if (
                    replica not in self._needed
                    or replica in came_from
                    or replica in self._by[wanted]
                ):
                    continue
                came_from[replica] = (wanted, giver)
                if len(self._needed[replica]) < self._depth:
                    self._hand_over(replica, came_from)
                    return True
                waiting.extend((each, replica) for each in self._needed[replica])
        return False

    def _hand_over(self, replica: int, came_from: dict[int, tuple[int, int | None]]) -> None:
        taker: int | None = replica
        while taker is not None:
            shard, giver = came_from[taker]
            if giver is not None:
                self._needed[giver].remove(shard)
                self._by[shard].remove(giver)
            self._add(taker, shard)
            taker = giver

    def _add(self, replica: int, shard: int) -> None:
        self._needed[replica].append(shard)
        self._by[shard].add(replica)
