"""Peers: the messages of the ranks of one job about their saves and restores.

A round is one meeting of all ranks around rank 0, which decides:

    every rank    arrive(seq, message), or fail(seq, error) if its part went wrong
    rank 0        gather(seq) -> everybody's message;  conclude(seq, outcome or error)
    the others    outcome(seq) -> the conclusion of rank 0

A save is one round, under D4 of the commit protocol (docs/durability.md). `agree` is a whole round
in one call, for work of all ranks on the training thread (restore, rewind).

Invariants:
- No call outlasts its deadline. Waiting for ranks ends after `timeout_s`. The others give rank 0
  `timeout_s` to arrive. If it has arrived, they give it half as long again as it may take to gather
  and conclude.
- On all ranks, PeerLostError names the missing ranks, and PeerFailedError quotes the failed rank.
- A failure ends the round at once for all ranks, also for those still on the way.
- A round costs a rank five to seven calls to a store. Rank 0 makes a few more, and two for every
  board.KEYS_PER_CALL ranks. Nothing is left of a round when two more have succeeded.
- Thread-safe for rounds of different kinds: a save in the background, `agree` in front of it.

Not here: how notes travel (board), their content (save/publishing).
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from statehold.errors import (
    PUBLISHED,
    InvariantError,
    PeerFailedError,
    PeerLostError,
    StateholdError,
)
from statehold.ranks.board import Board, did_not_come, lost_leader
from statehold.ranks.membership import Membership

_CONCLUDED, _FAILED = b"+", b"-"
_CALL = "call"
# A call of all ranks has fewer rounds than this.
ROUNDS_MAX = 1 << 20

# From its own arrival, which may be late, rank 0 waits `timeout_s` for the missing ranks, and then
# names them. A rank that gave rank 0 no more time would blame it for them.
_PATIENCE = 1.5


class Peers:
    """The ranks of a job, as seen by one of them, for as long as its membership lasts.

    board: carries their notes.
    timeout_s: how long to wait for a rank; it may change between rounds.
    """

    def __init__(self, board: Board, membership: Membership, timeout_s: float) -> None:
        self.membership = membership
        self.board = board
        self.timeout_s = timeout_s
        self._guard = threading.Lock()
        self._token: str | None = None
        self._agreed: dict[str, int] = {}
        self._calls = 0  # the number of the next call of all ranks
        self._lost_s = -math.inf  # when a rank was lost in a save
        self._held: dict[str, list[str]] = {}  # kind of round -> groups to forget, oldest first

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def world_size(self) -> int:
        return self.membership.world

    def open(self) -> str:
        """The job's token, the same on all ranks; the first call meets the other ranks."""
        with self._guard:
            if self._token is None:
                until = time.monotonic() + self.timeout_s
                self._token = self.board.open(self.rank, self.world_size, until)
            return self._token

    @property
    def token(self) -> str | None:
        """The job's token once it is known; never waits."""
        return self._token

    @contextlib.contextmanager
    def known_token(self) -> Iterator[str | None]:
        """See job_token. Rank 0 makes the token when the ranks meet: not while it holds this."""
        if self._token or self.rank or not self._guard.acquire(blocking=False):
            yield self._token or ""
            return
        try:
            yield self._token
        finally:
            self._guard.release()

    def attempt(self, seq: int) -> str:
        """A name for the seq-th save of this job, the same on all ranks and never used before."""
        return f"{self.open()}-{seq}"

    def post(self, name: str, note: bytes) -> None:
        """Leave a note that all ranks can read, in place of the last one of that name."""
        self.board.post(f"{self.open()}/{name}", note)

    def peek(self, name: str) -> bytes | None:
        """A note, if it is there by now."""
        return self.board.peek(f"{self.open()}/{name}")

    def awaited(self, name: str, givers: Iterable[int]) -> bytes:
        """A note, once it is there. Raises PeerLostError. givers: the ranks that may not have done
        what it takes."""
        missing = self.board.wait([f"{self.open()}/{name}"], time.monotonic() + self.timeout_s)
        note = None if missing else self.peek(name)
        if note is None:
            summary = f"a note of other ranks did not come within {self.timeout_s:g} s"
            hint = "look at what these ranks printed last. The next save waits for it again"
            raise PeerLostError(summary, ranks=givers, facts={"note": name}, hint=hint)
        return note

    def drop(self, name: str) -> None:
        """Remove a note, if it is there."""
        self.board.drop([f"{self.open()}/{name}"])

    def close(self) -> None:
        """Release connections. Notes stay, because another rank may not have read them yet."""
        self.board.close()

    # -- the round of a save ---------------------------------------------------------------

    def arrive(self, seq: int, message: bytes) -> None:
        """D4: this rank's part is durable."""
        self._enter("save", seq, message)

    def fail(self, seq: int, error: StateholdError, what: str = "save") -> None:
        """Instead of arrive(): this rank's part will not come. Ends the round for all ranks.

        After arrive(), only rank 0 decides how the round ends, so this then does nothing.
        """
        group = self._group(what, seq)
        with self._guard:
            held = self._held.setdefault(what, [])
            arrived = group in held
            if not arrived:
                held.append(group)
        if arrived and self.rank:
            return
        self.board.post(f"{group}/outcome", _encode(error, self.rank))
        self.board.ring(group)  # after the reason, which rank 0 looks for when it wakes

    def gather(self, seq: int, waiting_s: float = 0.0) -> list[bytes]:
        """Rank 0, having arrived: the messages of all ranks, in order.

        waiting_s: how long ago the save began. If a rank was lost since, only the rest of
        `timeout_s` is left: saves under way do not wait one after the other for a dead rank.
        """
        with self._noting_loss():
            return self._gather("save", seq, self._left_s(waiting_s))

    def conclude(self, seq: int, outcome: bytes | StateholdError, what: str = "save") -> None:
        """Rank 0: announce how the round ended, or a value without a round. Waits for no rank."""
        message = (
            _CONCLUDED + outcome if isinstance(outcome, bytes) else _encode(outcome, self.rank)
        )
        self.board.post(f"{self._group(what, seq)}/outcome", message)

    def outcome(self, seq: int, waiting_s: float = 0.0) -> bytes:
        """The others, having arrived: the conclusion of rank 0; raises if that is an error.

        waiting_s: as for gather(), if rank 0 was lost.
        """
        with self._noting_loss():
            return self._outcome("save", seq, self._left_s(waiting_s))

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except PeerLostError as error:
            if self.rank == 0 or 0 in error.ranks:  # whom this rank waits for
                self._lost_s = time.monotonic()
            raise

    def _left_s(self, waiting_s: float) -> float | None:
        if time.monotonic() - waiting_s >= self._lost_s:
            return None  # as long as usual
        return max(0.0, _PATIENCE * (self.timeout_s - waiting_s))

    def announced(self, what: str, seq: int) -> bytes:
        """The others: the value that rank 0 announces without a round, once it does."""
        return self._outcome(what, seq)

    def failure(self, seq: int) -> StateholdError | None:
        """Why the round has failed, if a rank has reported it by now."""
        message = self.board.peek(f"{self._group('save', seq)}/outcome")
        try:
            _decode(message or _CONCLUDED)
        except StateholdError as error:
            return error
        return None

    def agree(
        self,
        what: str,
        message: bytes,
        decide: Callable[[list[bytes]], bytes],
        seq: int | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """All ranks: post a message, let rank 0 decide over all messages, return the decision.

        seq: the number of the round, above all earlier ones of its kind, if a rank may have missed
            some; None counts them. timeout_s: the time for all of this; None: as for a save.
        """
        if seq is None:
            with self._guard:
                seq = self._agreed.get(what, 0)
                self._agreed[what] = seq + 1
        self._enter(what, seq, message)
        if self.rank:
            return self._outcome(what, seq, timeout_s)
        try:
            decision = decide(self._gather(what, seq, timeout_s))
        except BaseException as error:
            self.conclude(seq, _as_known(error), what)
            raise
        self.conclude(seq, decision, what)
        return decision

    def meet(self, message: bytes, decide: Callable[[list[bytes]], bytes], counts: str) -> bytes:
        """The first round of a call that all ranks make, and that may wait for all.

        Ranks pair again after a call that some of them did not make. A rank skips the calls that
        ended without it, and tries one again to which rank 0 did not come. Rounds of the kind
        `counts` get their numbers from that of the call.
        """
        seq = self._calls
        while self.rank and not self._has_entered(_CALL, seq) and self.has_ended(_CALL, seq):
            seq += 1
        self._calls = seq + 1
        try:
            decision = self.agree(_CALL, message, decide, seq)
        except PeerLostError:
            if self.rank and not self.has_ended(_CALL, seq):
                self._calls = seq
            raise
        self._agreed[counts] = seq * ROUNDS_MAX
        return decision

    def has_ended(self, what: str, seq: int) -> bool:
        """Whether a round of agree() has an outcome. A rank that comes to it again gets that
        outcome."""
        return self.board.peek(f"{self._group(what, seq)}/outcome") is not None

    # -- rounds of any kind ----------------------------------------------------------------

    def _group(self, kind: str, seq: int) -> str:
        return f"{self.open()}/{kind}-{seq}"

    def _enter(self, kind: str, seq: int, message: bytes) -> None:
        group = self._group(kind, seq)
        if self.rank:
            self._forget(kind, keep=1)
        if self._has_entered(kind, seq):
            self.board.post(f"{group}/{self.rank}", message)
            return
        with self._guard:
            self._held.setdefault(kind, []).append(group)
        self.board.enter(group, self.rank, self.world_size, message)

    def _has_entered(self, kind: str, seq: int) -> bool:
        return self._group(kind, seq) in self._held.get(kind, ())

    def _forget(self, kind: str, keep: int) -> None:
        """Drop this rank's notes of all but the newest rounds.

        The others keep one: rank 0 may still be gathering it if they gave up waiting. Rank 0 calls
        this when all have arrived at a round, so no rank will look at an earlier one again.
        """
        with self._guard:
            held = self._held.get(kind, [])
            old = held[: max(0, len(held) - keep)]
            del held[: len(old)]
        self.board.forget(old, self.rank)
        if self.rank == 0:
            self.board.drop([f"{group}/outcome" for group in old])

    def _gather(self, kind: str, seq: int, within_s: float | None = None) -> list[bytes]:
        group, size = self._group(kind, seq), self.world_size
        timeout_s = self.timeout_s if within_s is None else within_s / _PATIENCE
        missing = self.board.full(group, size, time.monotonic() + timeout_s)
        if not missing:
            messages = self.board.collect(group, size)
            self._forget(kind, keep=1)
            return messages
        failure = self.board.peek(f"{group}/outcome")
        if failure is not None:
            _decode(failure)
        limit_s = self.timeout_s if kind == "save" else timeout_s  # from the beginning of the save
        raise did_not_come(
            f"ranks did not arrive within {limit_s:g} s", missing, round=f"{kind} {seq}"
        )

    def _outcome(self, kind: str, seq: int, within_s: float | None = None) -> bytes:
        group = self._group(kind, seq)
        key = f"{group}/outcome"
        timeout_s = self.timeout_s if within_s is None else within_s
        missing = self.board.wait([key], time.monotonic() + timeout_s)
        if within_s is None and missing and self.board.peek(f"{group}/0") is not None:
            # Rank 0 is here and waits for another rank. It will name that rank, or be lost itself.
            missing = self.board.wait([key], time.monotonic() + _PATIENCE * self.timeout_s)
        message = None if missing else self.board.peek(key)
        if message is None:
            raise lost_leader(f"announce the outcome of {kind} {seq}").with_fact(
                "this rank", self.rank
            )
        return _decode(message)


@contextlib.contextmanager
def job_token(peers: Peers | None) -> Iterator[str | None]:
    """The token of the attempts that have to stay when the leftovers of dead jobs are cleared.

    None: this job has no attempts, and gets none meanwhile. "": other ranks may know the token.
    """
    if peers is None:
        yield None
    else:
        with peers.known_token() as token:
            yield token


def _as_known(error: BaseException) -> StateholdError:
    if isinstance(error, StateholdError):
        return error
    return InvariantError(f"unexpected {type(error).__name__}", facts={"cause": str(error)})


def _encode(error: StateholdError, rank: int) -> bytes:
    """An error as the others will see it: the lost or failed rank, and the reason."""
    message: dict[str, object] = {"rank": rank, "reason": str(error)}
    if isinstance(error, PeerLostError):
        message = {"lost": error.ranks, "summary": error.summary, "hint": error.hint}
    elif isinstance(error, PeerFailedError):
        message = {"rank": error.rank, "reason": error.reason, "follows": error.follows}
    if PUBLISHED in error.facts:
        message[PUBLISHED] = error.facts[PUBLISHED]
    return _FAILED + json.dumps(message).encode()


def _decode(message: bytes) -> bytes:
    if message[:1] == _CONCLUDED:
        return message[1:]
    error = json.loads(message[1:])
    if "lost" in error:
        raise PeerLostError(error["summary"], ranks=error["lost"], hint=error["hint"])
    failed = PeerFailedError(error["rank"], error["reason"], follows=error.get("follows", False))
    if PUBLISHED in error:
        failed.with_fact(PUBLISHED, error[PUBLISHED])
    raise failed
