"""Saves with use_collectives=False: the ranks meet in the store of the process group instead.

torch then runs the whole save on each rank by itself. Every planner makes a "global" plan of its
own rank, and every rank calls finish(). The ranks have not shared out the writing. So a plain
tensor or a value belongs to the rank that saved it, as with the stock writer, and a box of a
DTensor to the lowest rank that wrote it.

Invariants: there is one attempt, made by rank 0 before any rank writes. The step is published once
every rank has written all of its part, or not at all. If a rank fails, or does not come within
`timeout_s`, the save fails on all ranks, with the number of that rank.
Not here: how notes travel (board), rounds (peers), records (commit).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from statehold.errors import InvariantError, PeerFailedError, StateholdError, named
from statehold.format.manifest import RecordEntry
from statehold.integrations.dcp.among import rank_and_world
from statehold.integrations.dcp.commit import Sent
from statehold.integrations.dcp.writing import SaveDestination, WrittenBox
from statehold.layout.layout import Box
from statehold.ranks.board import StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers

logger = logging.getLogger("statehold")

_SAVE = 1  # the only round of its Peers


class SaveRound:
    """The ranks of one save, from its begin to its end."""

    def __init__(self, final: str, timeout_s: float) -> None:
        self.rank, self.world_size = rank_and_world()
        self._board = StoreBoard(_get_default_store(), f"dcp:{final}")
        self._peers = Peers(self._board, Membership(self.rank, self.world_size), timeout_s)

    def begin(self, make: Callable[[], SaveDestination]) -> SaveDestination:
        """The result of `make` on rank 0, on every rank."""
        raw = self._peers.agree("begin", b"", lambda _: json.dumps(_place_to(make())).encode())
        return _place_from(json.loads(raw), self.rank)

    def failed(self, error: BaseException) -> None:
        """Report to the others that this rank will not come."""
        known = error if isinstance(error, StateholdError) else InvariantError(repr(error))
        self._peers.fail(_SAVE, known)

    def end(
        self, sent: Sent, publish: Callable[[list[Sent]], None], is_there: Callable[[], bool]
    ) -> None:
        """Hand over the files of this rank; returns once rank 0 has published them with the rest.

        is_there: whether the checkpoint is published, for a rank that gets no outcome from rank 0.
        """
        try:
            self._peers.arrive(_SAVE, json.dumps(_sent_to(sent)).encode())
            if self.rank:
                self._wait(is_there)
            else:
                self._conclude(sent, publish)
        finally:
            self._board.close()

    def _wait(self, is_there: Callable[[], bool]) -> None:
        try:
            self._peers.outcome(_SAVE)
        except PeerFailedError:
            raise
        except StateholdError:
            # Rank 0 may have been lost after it committed, before it could announce the outcome.
            if not is_there():
                raise

    def _conclude(self, own: Sent, publish: Callable[[list[Sent]], None]) -> None:
        try:
            others = self._peers.gather(_SAVE)[1:]
            publish([own, *(_sent_from(own.place, raw) for raw in others)])
        except BaseException as error:
            self._peers.conclude(_SAVE, named(error, "while publishing a checkpoint"))
            raise
        try:
            self._peers.conclude(_SAVE, b"")
        except StateholdError as error:  # the others check for themselves
            logger.warning("the checkpoint is committed; could not tell the other ranks\n%s", error)


# -- notes -----------------------------------------------------------------------------------------


def _place_to(place: SaveDestination) -> list[Any]:
    return [place.final, place.partial, place.step, place.world_size, place.attempt]


def _place_from(note: list[Any], rank: int) -> SaveDestination:
    final, partial, step, world_size, attempt = note
    return SaveDestination(final, partial, step, rank, world_size, attempt)


def _sent_to(sent: Sent) -> dict[str, Any]:
    """The part without files and values, which a rank leaves in its own record."""
    entry = sent.entry and [sent.entry.name, sent.entry.bytes, sent.entry.sha256]
    pieces = [
        [piece.name, piece.dtype, piece.shape, piece.box.offsets, piece.box.shape]
        for piece in sent.pieces
        if not piece.local
    ]
    return {
        "rank": sent.place.rank,
        "pieces": pieces,
        "entry": entry,
        "digests": dict(sent.digests),
    }


def _sent_from(place: SaveDestination, raw: bytes) -> Sent:
    note = json.loads(raw)
    pieces = tuple(
        WrittenBox(name, dtype, tuple(shape), Box(tuple(offsets), tuple(sizes)), local=False)
        for name, dtype, shape, offsets, sizes in note["pieces"]
    )
    own = SaveDestination(
        place.final, place.partial, place.step, note["rank"], place.world_size, place.attempt
    )
    return Sent(own, pieces, {}, RecordEntry(*note["entry"]), note["digests"], None)
