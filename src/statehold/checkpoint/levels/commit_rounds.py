"""How the parts of all ranks become one step: in one meeting, or in two.

    1   every rank has done its part, or says why not; at a level that all see, rank 0 then commits
    2   at a level of several hosts: the first rank of each publishes the same manifest there; the
        step is committed when all have, and no earlier

Invariants: what fails on one rank fails on all, by name and in time; a rank that is lost between
the rounds leaves a step on some hosts that is offered nowhere (census). On one host there is no
second round.
Not here: what a part is (copying, team), how ranks talk (ranks/peers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statehold.errors import PeerFailedError, StateholdError, named

if TYPE_CHECKING:
    from statehold.checkpoint.levels.places import Place
    from statehold.ranks.peers import Peers

__all__ = ["HALF_PUBLISHED", "CommitRounds"]

# The fact of an error in the second round: hosts may have published what is no step.
HALF_PUBLISHED = "half published"


@dataclass(frozen=True, slots=True)
class CommitRounds:
    """The rounds of one save, or one copy: its kind and number, the same on all ranks. `doing`: for
    messages."""

    peers: Peers | None
    kind: str
    number: int
    doing: str

    def at(self, place: Place, commit: Callable[[], None]) -> Callable[[], None]:
        """What rank 0 does in the first round: `commit`, at a level that all see."""
        return commit if not place.is_apart else _nothing

    def meet(
        self,
        told: bytes,
        check: Callable[[Sequence[bytes]], None],
        failure: Exception | None,
        then: Callable[[], None],
    ) -> None:
        """The first round: `check` raises, on rank 0, where what all ranks tell is not well; else
        `then` is done there. `failure`: why this rank's part is not there."""
        self._meet(self.kind, told, check, failure, then)

    def publish(self, place: Place, commit: Callable[[], None]) -> None:
        """The second round, where there is one."""
        if not place.is_apart:
            return
        failure: Exception | None = None
        try:
            if place.leads:
                commit()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure = error
        told = b"" if failure is None else str(named(failure, self.doing)).encode()
        try:
            self._meet(f"{self.kind} published", told, _check_none, failure, _nothing)
        except StateholdError as error:
            raise error.with_fact(HALF_PUBLISHED, "perhaps, on some of the hosts") from None

    def _meet(
        self,
        kind: str,
        told: bytes,
        check: Callable[[Sequence[bytes]], None],
        failure: Exception | None,
        then: Callable[[], None],
    ) -> None:
        if self.peers is None:
            if failure is not None:
                raise failure
            then()
            return

        def decide(told: Sequence[bytes]) -> bytes:
            check(told)
            then()
            return b""

        try:
            self.peers.agree(kind, told, decide, self.number)
        finally:
            if failure is not None:
                raise failure


def _check_none(told: Sequence[bytes]) -> None:
    for rank, reason in enumerate(told):
        if reason:
            raise PeerFailedError(rank, reason.decode())


def _nothing() -> None: ...
