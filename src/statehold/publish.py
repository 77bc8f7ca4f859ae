"""From durable files to a committed step: D3 to D7, by one rank alone or by all ranks together.

    Alone      manifest -> commit
    Together   record -> D3 sealed -> D4 arrive -> rank 0: gather, judge, commit, conclude
                                                -> the others: wait for what rank 0 concludes

Holds: rank 0 commits only when the records of all ranks are durable, of one step, and planned with
the same knowledge (claims); a rank that fails says so, and the others fail with its reason.
Runs on the commit thread only: no collective, and nothing here waits on the training thread.
Not here: how ranks talk (peers), what is on disk (record, manifest), the files (store).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from statehold.claims import Claims, Lesson, judge, lesson_document, lesson_of, message
from statehold.errors import PeerFailedError, StateholdError
from statehold.layout import Ranks
from statehold.manifest import Commit, RecordEntry, Shared, record_name
from statehold.share import balance, balance_of
from statehold.writes import build_manifest, build_record, now, writer_name

if TYPE_CHECKING:
    from statehold.peers import Peers
    from statehold.pipeline import Work
    from statehold.store import Store


class Publisher(Protocol):
    """How a save becomes a step. `attempt` names the directory of a save under way, if need be."""

    def attempt(self, number: int) -> str | None: ...
    def publish(self, work: Work, sums: bytes) -> None: ...
    def announce(self, work: Work) -> None: ...
    def give_up(self, number: int, error: StateholdError) -> None: ...
    def clean_up(self, work: Work) -> None: ...


class Alone:
    """One rank, which needs to ask nobody."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def attempt(self, number: int) -> str | None:
        return None

    def publish(self, work: Work, sums: bytes) -> None:
        self._store.commit(build_manifest(work.plan.save, work.tree, sums))

    def announce(self, work: Work) -> None:
        """Nobody to tell."""

    def give_up(self, number: int, error: StateholdError) -> None:
        """Nobody to tell."""

    def clean_up(self, work: Work) -> None:
        self._store.abandon(work.save.step)


class Together:
    """One of several ranks that save into one run directory; rank 0 commits."""

    def __init__(self, store: Store, peers: Peers, claims: Claims) -> None:
        self._store = store
        self._peers = peers
        self._claims = claims
        self._arrived = -1
        self._outcome = b""

    def attempt(self, number: int) -> str | None:
        return self._peers.attempt(number)

    def publish(self, work: Work, sums: bytes) -> None:
        attempt = work.attempt
        assert attempt is not None
        record = build_record(work.plan, work.tree, sums, attempt, work.fingerprints)
        raw = record.encode()
        name = record_name(self._peers.rank, self._peers.world_size)
        self._store.seal(work.save.step, attempt, name, raw)  # D3
        self._peers.arrive(work.number, self._told(work, record.said(), raw))  # D4
        self._arrived = work.number
        if self._peers.rank == 0:
            self._commit(work, attempt)
        elif not self._is_told(work.number):
            if not self._store.confirm(work.save.step, attempt):
                raise self._lost
            return self._claims.forget(work.number)
        self._take(work)

    def announce(self, work: Work) -> None:
        """Rank 0: the step is committed, and what is no longer kept can be overwritten."""
        if self._peers.rank == 0:
            try:
                self._peers.conclude(work.number, self._outcome)
            except StateholdError as error:  # the step is safe, and the others will find it
                logger.warning("could not tell the other ranks of a step\n%s", error)

    def give_up(self, number: int, error: StateholdError) -> None:
        """This rank's save has failed: tell the others, unless they told this rank."""
        self._claims.forget(number)
        try:
            if self._peers.rank == 0:
                self._peers.conclude(number, error)
            elif number > self._arrived:
                self._peers.fail(number, error)
        except StateholdError as fault:
            logger.warning("could not tell the other ranks of a failure\n%s", fault)

    def clean_up(self, work: Work) -> None:
        if self._peers.rank == 0 and work.attempt is not None:
            self._store.abandon(work.save.step, work.attempt)

    def _commit(self, work: Work, attempt: str) -> None:
        told = [json.loads(each) for each in self._peers.gather(work.number)]
        _check_alike(told, "step", "the ranks do not save the same step")
        _check_alike(told, "version", "the ranks have not learned the same from earlier saves")
        lesson = judge([each["claims"] for each in told])
        self._store.commit(
            Commit(
                step=work.save.step,
                world_size=self._peers.world_size,
                created=now(),
                writer=writer_name(),
                attempt=attempt,
                records=tuple(
                    RecordEntry(record_name(rank, len(told)), *each["record"])
                    for rank, each in enumerate(told)
                ),
                state=_groups([each["said"] for each in told]),
                shared=_shared(lesson),
            ),
            attempt,
        )
        spread = balance([each["bytes"] for each in told], [each["host"] for each in told])
        self._outcome = json.dumps(
            {"lesson": lesson_document(lesson), "balance": asdict(spread)}
        ).encode()

    def _told(self, work: Work, said: Mapping[str, str], raw: bytes) -> bytes:
        """What this rank tells rank 0 when its part is durable."""
        told = {
            "step": work.save.step,
            "bytes": work.plan.save.file_bytes,
            "host": socket.gethostname(),
            "record": [len(raw), hashlib.sha256(raw).hexdigest()],
            "said": said,
            "version": work.version,
            "claims": message(self._peers.rank, work.comparisons, work.fingerprints),
        }
        return json.dumps(told).encode()

    def _take(self, work: Work) -> None:
        outcome = json.loads(self._outcome)
        self._claims.learn(work.number, lesson_of(outcome["lesson"]))
        work.save._record(balance=balance_of(outcome["balance"]))


def _check_alike(told: Sequence[Mapping[str, Any]], key: str, summary: str) -> None:
    values = [each[key] for each in told]
    for rank, value in enumerate(values):
        if value != values[0]:
            raise PeerFailedError(rank, summary).with_fact(
                key, f"rank 0 has {values[0]}, rank {rank} has {value}"
            )


def _groups(said: Sequence[Mapping[str, str]]) -> dict[str, tuple[Ranks, ...]]:
    """For each name at the top of the state, the ranks that say the same of it."""
    groups: dict[str, defaultdict[str, list[int]]] = {}
    for rank, digests in enumerate(said):
        for key, digest in digests.items():
            groups.setdefault(key, defaultdict(list))[digest].append(rank)
    return {key: tuple(map(Ranks.of, found.values())) for key, found in groups.items()}


def _shared(lesson: Lesson) -> tuple[Shared, ...]:
    return tuple(
        Shared(Ranks.of(rank for mesh in found.meshes for rank in mesh.ranks), found.equal)
        for found in lesson.values()
        if len(found.meshes) > 1 and found.equal
    )
