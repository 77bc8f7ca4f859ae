"""Meetings: the ranks of a group tell each other how to reach them, at the desk of one of them.

Every rank has a Desk. A rank says one sentence at the desk where its epoch meets, and the answer
has what every rank of its group has said. A TCPStore of torch would do, but each of its connections
looks a name up at both ends. On a machine whose name server loses a packet, everybody waits for
five seconds, because a TCPStore has one thread.

Invariants: a rank that goes away before its group is complete leaves nothing behind. A rank that
says something else loses its connection, and nobody else notices. No name is looked up, as long as
addresses are numbers.
Not here: what the ranks say (gloo), which desk an epoch meets at (protocol), who is let in
(net/reception).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import NamedTuple

from statehold.encoding import strictjson
from statehold.net import addresses
from statehold.net.reception import Guest, Reception
from statehold.net.secret import of_job
from statehold.net.wire import connect
from statehold.process.worker import Flag
from statehold.resilience.protocol.actions import GroupLostError

# For a connection.
CONNECT_S = 5.0
_DOOR = "desk"
_SENTENCE_MAX = 1 << 16
_RANKS_MAX = 1 << 20


def meet(desk: str, group: str, rank: int, size: int, says: str, revoked: Flag) -> list[str]:
    """What the ranks of a group say, by rank. Raises GroupLostError."""
    sentence = json.dumps([group, rank, size, says]).encode()
    until = time.monotonic() + CONNECT_S
    try:
        wire = connect(addresses.split(desk), _DOOR, of_job(), until, revoked)
        with contextlib.closing(wire):
            wire.frame_max = size * _SENTENCE_MAX
            wire.send(sentence, until)
            return _sayings(strictjson.message(wire.receive(math.inf)), size)
    except (OSError, ValueError) as error:
        if revoked.is_set:
            raise GroupLostError("the epoch has ended while its ranks met") from None
        raise GroupLostError(f"the desk {desk} does not answer: {error}") from error


def _sayings(answer: object, size: int) -> list[str]:
    if type(answer) is not list or [type(each) for each in answer] != [str] * size:
        raise ValueError("not what the ranks of a group say")
    return answer


def _row(sentence: bytes) -> tuple[str, int, int, str]:
    """What a visitor says: its group, its rank, how many ranks the group has, and to them."""
    said = strictjson.message(sentence)
    if type(said) is not list or [type(each) for each in said] != [str, int, int, str]:
        raise ValueError("not a sentence of a meeting")
    group, rank, size, says = said
    if not 0 <= rank < size <= _RANKS_MAX:
        raise ValueError("no rank of a group")
    return group, rank, size, says


class MeetingPlace(NamedTuple):
    """Where the ranks of an epoch find each other.

    desk: the address of the Desk where they meet.
    place: (replica, rank in the replica); size: (replicas, ranks of a replica).
    host: the address of this machine that others can reach.
    revoked: set when the epoch has ended.
    """

    desk: str
    epoch: int
    place: tuple[int, int]
    size: tuple[int, int]
    host: str
    revoked: Flag

    def meet(self, group: str, rank: int, size: int, says: str) -> list[str]:
        """What the ranks of a group of this epoch say, by rank. Raises GroupLostError."""
        return meet(self.desk, f"{self.epoch}/{group}", rank, size, says, self.revoked)


class Desk:
    """A place where groups meet, served by a thread. host: an address that others can reach."""

    def __init__(self, host: str) -> None:
        secret = of_job()
        listener = addresses.listen(host)
        self.address = addresses.joined(host, listener.getsockname()[1])
        self._waiting: dict[str, dict[int, Guest]] = {}
        self._reception = Reception([listener], _DOOR, secret, frame_max=_SENTENCE_MAX)
        self._reception.start("statehold-desk", self._join, self._forget)

    def close(self) -> None:
        self._reception.close()

    def _join(self, guest: Guest, sentence: bytes) -> None:
        if guest.data is not None:
            raise ValueError("a second sentence")
        group, rank, size, says = _row(sentence)
        guest.data = group, rank, says
        present = self._waiting.setdefault(group, {})
        present[rank] = guest
        if len(present) < size:
            return
        del self._waiting[group]
        answer = json.dumps([present[each].data[2] for each in sorted(present)]).encode()
        for each in list(present.values()):
            try:
                self._reception.finish(each, answer)
            except OSError as error:  # its group will miss it
                self._reception.drop(each, error)

    def _forget(self, guest: Guest, error: Exception) -> None:
        if guest.data is None:
            return
        group, rank, _ = guest.data
        present = self._waiting.get(group, {})
        if present.get(rank) is guest:
            del present[rank]
            if not present:
                del self._waiting[group]
