"""How the parts of all ranks become one step, in one round or in two.

    1   every rank has done its part, or says why not; at a level that all see, rank 0 then commits
    2   at a level of several hosts: the first rank of each host publishes the same manifest there;
        the step is committed when all have, and no earlier

Invariants: a failure on one rank is a failure on all, by name and in time. If a rank is lost
between the rounds, some hosts have a step that no reader sees (census). On one host there is no
second round.
Not here: the parts (steps/copying, save/publishing), how ranks talk (ranks/peers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statehold.errors import PeerFailedError, StateholdError, named
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import Round
from statehold.steps.target import Target

# The fact of an error in the second round: some hosts may have published a step that does not
# count.
HALF_PUBLISHED = "half published"


@dataclass(frozen=True, slots=True)
class CommitRounds:
    """The rounds of one save or copy: its kind and number, the same on all ranks. `doing`: for
    messages."""

    peers: Peers | None
    kind: str
    number: int
    doing: str

    def at(self, place: Target, commit: Callable[[], None]) -> Callable[[], None]:
        """The work of rank 0 in the first round: `commit`, at a level that all see."""
        return commit if not place.is_apart else _nothing

    def gather(
        self,
        message: Any,
        check: Callable[[list[Any]], Any],
        failure: Exception | None,
        then: Callable[[], None],
    ) -> Any:
        """The first round, of plain values of JSON.

        On rank 0, `check` raises if the messages of the ranks are not well; otherwise `then` runs
        there. All ranks get what `check` returns; a process that is alone gets nothing.
        `failure`: why this rank's part is missing.
        """
        return self._hold(self.kind, message, check, failure, then)

    def publish(self, place: Target, commit: Callable[[], None]) -> None:
        """The second round, if there is one."""
        if not place.is_apart:
            return
        failure: Exception | None = None
        try:
            if place.leads:
                commit()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure = error
        message = None if failure is None else str(named(failure, self.doing))
        try:
            self._hold(f"{self.kind} published", message, _check_none, failure, _nothing)
        except StateholdError as error:
            raise error.with_fact(HALF_PUBLISHED, "perhaps, on some of the hosts") from None

    def _hold(
        self,
        kind: str,
        message: Any,
        check: Callable[[list[Any]], Any],
        failure: Exception | None,
        then: Callable[[], None],
    ) -> Any:
        if self.peers is None:
            if failure is not None:
                raise failure
            then()
            return None

        def decide(messages: list[Any]) -> Any:
            told = check(messages)
            then()
            return told

        try:
            return Round(kind, self.number).hold(self.peers, message, decide)
        finally:
            if failure is not None:
                raise failure


def _check_none(reasons: list[Any]) -> None:
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise PeerFailedError(rank, reason)


def _nothing() -> None: ...
