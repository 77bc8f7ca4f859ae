"""Acting together: a failure on one rank is a failure on all, with the reason, within a deadline.

    together   every rank acts; all continue, or none does
    pooled     the same, and every rank gets a report of each
    led        rank 0 acts for all; the others get its result
    everyone   every rank acts, and gets the results of all
    called     the first round of a call: all ranks make the same one

Invariants: all ranks raise the same kind of error. Damage that one rank finds counts for all, so
all try the same older step. The rank with the damage raises its own error. A process that is alone
just acts. For restore() and rewind(), which may wait, never for saves.
Not here: how ranks talk and when they give up (ranks/peers).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from statehold.errors import CorruptionError, PeerFailedError, StateholdError, StateMismatchError
from statehold.ranks.peers import Peers

T = TypeVar("T")


KIND = "together"


class Round(NamedTuple):
    """The parameters of a round. number, timeout_s: those of Peers.agree."""

    kind: str = KIND
    number: int | None = None
    timeout_s: float | None = None

    def hold(self, peers: Peers, own: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 decides over what all ranks have, by rank: plain values of JSON."""

        def decided(messages: Sequence[bytes]) -> bytes:
            return json.dumps(decide([json.loads(each) for each in messages])).encode()

        message = json.dumps(own).encode()
        raw = peers.agree(self.kind, message, decided, self.number, self.timeout_s)
        return json.loads(raw)


USUAL = Round()

# Kinds of failures, the worst first: the worst one of any rank decides for all.
_OTHER, _DAMAGE, _MISMATCH = "other", "damage", "mismatch"


class MismatchElsewhere(PeerFailedError):
    """On another rank, the state and the step do not fit together."""


def together(peers: Peers | None, act: Callable[[], T], within: Round = USUAL) -> T:
    """Act on every rank; raise on every rank if it fails on one."""
    return pooled(peers, act, lambda _: None, within)[0]


def pooled(
    peers: Peers | None, act: Callable[[], T], describe: Callable[[T], Any], within: Round = USUAL
) -> tuple[T, list[Any]]:
    """Act on every rank; raise on every rank if it fails on one.

    Returns the result on this rank, and the reports of all ranks, which `describe` makes from the
    results: plain values of JSON.
    """
    if peers is None:
        result = act()
        return result, [describe(result)]
    failure: Exception | None = None
    value: Any = None
    try:
        result = act()
        value = describe(result)
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure = error
    own = [None if failure is None else [_kind(failure), _text(failure)], value]
    worst, values = within.hold(peers, own, _pool)
    if worst is None:
        return result, values  # no rank failed, so it exists
    rank, kind, text = worst
    if failure is not None and _kind(failure) == kind:
        raise failure
    raise _elsewhere(rank, kind, text)


def led(peers: Peers | None, act: Callable[[], T], within: Round = USUAL) -> T:
    """The result of `act` on rank 0, on all ranks; a plain value of JSON."""
    if peers is None:
        return act()
    value: T = within.hold(peers, None, lambda _: act())
    return value


def everyone(peers: Peers | None, act: Callable[[], T]) -> list[T]:
    """The results of `act` on all ranks; plain values of JSON."""
    return pooled(peers, act, lambda value: value)[1]


def called(peers: Peers | None, call: str, act: Callable[[], T]) -> T:
    """The first round of a call: the result of `act` on rank 0, as of led().

    call: what this rank calls, as a user would write it. If another rank calls something else, all
        ranks raise PeerFailedError.
    """
    if peers is None:
        return act()

    def decide(calls: Sequence[bytes]) -> bytes:
        for rank, each in enumerate(calls):
            if each != calls[0]:
                own, other = calls[0].decode(), each.decode()
                raise PeerFailedError(rank, f"it called {other}, and rank 0 called {own}")
        return json.dumps([call, act()]).encode()

    of_rank_0, value = json.loads(peers.meet(call.encode(), decide, KIND))
    if of_rank_0 != call:  # the answer to an earlier call, for which this rank has not waited
        raise PeerFailedError(0, f"it called {of_rank_0}, and this rank called {call}")
    result: T = value
    return result


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StateholdError) else f"{type(error).__name__}: {error}"


def _kind(error: Exception) -> str:
    if isinstance(error, StateMismatchError):
        return _MISMATCH
    return _DAMAGE if isinstance(error, CorruptionError) else _OTHER


def _pool(found: list[Any]) -> list[Any]:
    """[worst failure, None] or [None, all values]."""
    failures, values = zip(*found, strict=True)
    worst = _worst(failures)
    return [worst, None if worst else values]


def _worst(failures: Sequence[Any]) -> list[Any] | None:
    """[rank, kind, text] of the worst failure, the lowest rank first; None if there is none."""
    found = [[rank, *failure] for rank, failure in enumerate(failures) if failure]
    for kind in (_OTHER, _DAMAGE, _MISMATCH):
        for failure in found:
            if failure[1] == kind:
                return failure
    return None


def _elsewhere(rank: int, kind: str, text: str) -> StateholdError:
    if kind == _DAMAGE:
        return CorruptionError(f"rank {rank} found damage", facts={"its error": text})
    return (MismatchElsewhere if kind == _MISMATCH else PeerFailedError)(rank, text)
