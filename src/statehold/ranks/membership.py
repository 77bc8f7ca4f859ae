"""Membership: who a rank is among the ranks of its job, as a value.

    Membership(rank, world)            a rank of a job
    Membership(rank, world, epoch)     the same job, after its ranks have changed so many times
    ALONE                              a process that has no other ranks

Invariants: nothing changes a membership. A job whose ranks change gives each of them another one,
with a greater epoch. Whatever depends on the number of ranks takes a membership as an argument, so
that it is made again with the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from statehold.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Membership:
    """Rank `rank` of `world` ranks, in the `epoch`-th membership of the job, counted from 0."""

    rank: int
    world: int
    epoch: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise InvariantError(
                "the rank is outside its world", facts={"rank": self.rank, "world size": self.world}
            )

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides for all."""
        return self.rank == 0


ALONE = Membership(0, 1)
