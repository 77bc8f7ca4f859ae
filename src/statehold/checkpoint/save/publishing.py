"""From durable files to a committed step: D3 to D7, by one rank alone or by all ranks together.

    Publisher  of a process that is alone: manifest -> commit
    Together   record -> D3 sealed -> D4 arrive -> rank 0: gather, judge, commit, conclude
                                                -> the others: wait for the outcome from rank 0
    Across     the same into a level that each host has for itself, in two rounds

Invariants: rank 0 commits only when the records of all ranks are durable, are in its own directory,
belong to one step, and were planned with the same knowledge (claims). A rank that fails announces
why, and the others fail with its reason. After the commit nothing fails the save, on any rank. All
of this runs on the commit thread. It uses no collective, and the training thread waits for nothing
here.

Not here: how ranks talk (peers), the content of files (record, manifest), the files (store).
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.commit_rounds import CommitRounds
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.promoting import NO_COPIES, Promotions
from statehold.checkpoint.save.handle import Work
from statehold.checkpoint.save.writes import WRITER, Sealing, now
from statehold.errors import (
    PUBLISHED,
    MissingFileError,
    PeerFailedError,
    PeerLostError,
    StateholdError,
    StorageError,
)
from statehold.format.entries import About, Origin, sha256
from statehold.format.manifest import Commit, Manifest, RecordEntry, Shared, groups_of, record_name
from statehold.format.saved import MANIFEST_NAME, cached
from statehold.layout.claims import Claims, Lesson, judge, lesson_document, lesson_of, message
from statehold.layout.layout import Ranks
from statehold.layout.share import Balance, Spread, balance
from statehold.observe.background_log import BackgroundLog
from statehold.ranks.board import lost_leader
from statehold.ranks.peers import Peers
from statehold.steps.target import DirectoryPlace

# -- one rank alone, or all together ---------------------------------------------------------------


_TURNS = "turns"

# Work after a commit, for the log.
_CHOOSE_INTERVAL = "choose how often steps are saved"
_CHOOSE_LEVELS = "choose the levels that it is copied to"
_LEARN = "learn which tensors the ranks hold alike"


class Publisher:
    """Turns a save into a step: here in a process that is alone.

    rank: None for such a process. leads: this rank commits and retires steps.
    """

    rank: int | None = None
    leads = True

    def __init__(
        self, descent: Descent, promotions: Promotions, schedule: Schedule, log: BackgroundLog
    ) -> None:
        self._descent = descent
        self._promotions = promotions
        self._schedule = schedule
        self._log = log
        self._sealing = Sealing()

    def publish(self, work: Work, sums: bytes) -> None:
        """D3 to D7, once this rank's file is durable. sums: the checksums of the file."""
        step = work.save.step
        about = replace(work.about, parent=self._descent.parent)
        raw = self._sealing.manifest(work.plan, work.tree, sums, work.taken, about)
        work.place.store.commit(step, raw)
        with after_commit(self._log, step, _CHOOSE_INTERVAL):
            self._schedule.committed(work.number, work.save.elapsed(), hosts=1)
        with after_commit(self._log, step, _CHOOSE_LEVELS):
            work.promote = self._promotions.decide(step, work.place, work.about.tags)

    def announce(self, work: Work) -> None:
        """The step is committed, and older steps were retired."""

    def give_up(self, number: int, error: StateholdError) -> None:
        """The save has failed on this rank."""
        self._schedule.failed(number)

    def cause(self, work: Work, error: BaseException) -> BaseException:
        """Why a save failed on this rank: `error`, or an earlier failure of another rank."""
        return error

    def is_unsure(self, work: Work, error: StateholdError) -> bool:
        """Whether a save that failed with `error` may have been committed by another rank."""
        return False

    def clean_up(self, work: Work) -> None:
        """Remove the files of a failed save."""
        work.place.abandon(work.save.step, None)


class Together(Publisher):
    """One of several ranks, `peers`, that save into one run directory; rank 0 commits."""

    def __init__(
        self,
        peers: Peers,
        claims: Claims,
        descent: Descent,
        promotions: Promotions,
        schedule: Schedule,
        log: BackgroundLog,
    ) -> None:
        super().__init__(descent, promotions, schedule, log)
        self.peers = peers
        self._claims = claims
        self.rank = peers.rank
        self.leads = peers.rank == 0
        self._told = -1  # the newest save of which rank 0 may have heard that this part is durable
        self._arrived = -1  # the newest save of which it has
        self._outcome = b""

    def publish(self, work: Work, sums: bytes) -> None:
        assert work.attempt is not None
        raw, digests = self._sealing.record(
            work.plan, work.tree, sums, work.taken, work.attempt, work.fingerprints
        )
        name = record_name(self.peers.rank, self.peers.world_size)
        with work.save.stage("seal"):
            work.place.store.seal(work.save.step, work.attempt, name, raw)  # D3
        self._told = work.number
        with work.save.stage("arrive"):
            self.peers.arrive(work.number, self._message(work, digests, raw))  # D4
        self._arrived = work.number
        decide = self._decide if self.leads else self._wait
        outcome = decide(work, work.attempt)
        if outcome is not None:
            self._settle(work, outcome)
            self._take(work, outcome)

    def announce(self, work: Work) -> None:
        if not self.leads:
            return
        with after_commit(self._log, work.save.step, "leave a note of its interval"):
            self._leave_note()
        # A rank that does not get the outcome looks for the step itself.
        self.peers.conclude(work.number, self._outcome)

    def give_up(self, number: int, error: StateholdError) -> None:
        self._claims.forget(number)
        try:
            if self.leads:
                self._leave_note()
                self.peers.conclude(number, error)
            elif number > self._arrived:
                self.peers.fail(number, error)
            self._look_for_note()
        except StateholdError as fault:  # the others notice when their deadline passes
            self._log.warning("could not announce a failure to the other ranks\n%s", fault)

    def _leave_note(self) -> None:
        """Rank 0: leave a note for a rank that misses a message about the turns."""
        if not self._schedule.is_led:
            return
        with contextlib.suppress(StateholdError):  # the next note is as good
            self.peers.post(_TURNS, json.dumps(self._schedule.note()).encode())

    def _look_for_note(self) -> None:
        """Other ranks, after a failure: their turns may differ from those of rank 0."""
        note = self.peers.peek(_TURNS) if self._schedule.is_led and not self.leads else None
        if note is not None:
            self._schedule.catch_up(json.loads(note))

    def cause(self, work: Work, error: BaseException) -> BaseException:
        # Once a save has failed, the ranks that know remove its directory, and others still write.
        if not _is_missing(error):
            return error
        with contextlib.suppress(StateholdError):
            return self.peers.failure(work.number) or error
        return error

    def is_unsure(self, work: Work, error: StateholdError) -> bool:
        if self.leads or work.number > self._arrived or isinstance(error, PeerFailedError):
            return False
        return not isinstance(error, PeerLostError) or 0 in error.ranks

    def clean_up(self, work: Work) -> None:
        # Rank 0 may be about to publish the files of a rank that it has heard of, unless it says
        # that the save has failed.
        store, step, attempt, error = work.place.store, work.save.step, work.attempt, work.error
        has_failed = isinstance(error, PeerFailedError) and PUBLISHED not in error.facts
        is_over = has_failed and not (self.leads or work.place.is_apart)
        if attempt is not None and (self.leads or is_over or work.number > self._told):
            store.abandon(step, attempt)
            if is_over:  # rank 0 may not see the directory; with files of other ranks it stays
                with contextlib.suppress(StorageError):
                    store.fs.rmdir(store.partial(step, attempt))

    # -- rank 0 ----------------------------------------------------------------------------

    def _decide(self, work: Work, attempt: str) -> Mapping[str, Any]:
        """D4 to D7. Returns the outcome for the other ranks."""
        with work.save.stage("gather"):
            notes = self.peers.gather(work.number, work.save.elapsed())
            messages = [json.loads(each) for each in notes]
        _check_alike(messages, "step", "a rank saves another step than rank 0")
        _check_alike(
            messages, "version", "a rank and rank 0 know different outcomes of earlier saves"
        )
        lesson = judge([each["claims"] for each in messages])
        commit = Commit(
            step=work.save.step,
            world_size=len(messages),
            created=now(),
            writer=WRITER,
            attempt=attempt,
            records=tuple(
                RecordEntry(record_name(rank, len(messages)), *each["record"])
                for rank, each in enumerate(messages)
            ),
            state=groups_of([each["digests"] for each in messages]),
            shared=_shared(lesson),
            about=replace(work.about, parent=self._descent.parent),
        )
        spread = balance([each["bytes"] for each in messages], [each["host"] for each in messages])
        outcome: dict[str, Any] = {
            "lesson": lesson_document(lesson),
            "balance": asdict(spread),
            "promote": NO_COPIES,
            "turns": None,
        }
        self._outcome = json.dumps(outcome).encode()  # announced even if a later action fails
        self._land(work, commit)
        self._choose(work, outcome, hosts=len({each["host"] for each in messages}))
        self._keep_outcome(work, commit, outcome)
        return outcome

    def _choose(self, work: Work, outcome: dict[str, Any], hosts: int) -> None:
        """Rank 0 decides when steps are saved from now on, and which levels get this one."""
        with self._landed(work, _CHOOSE_INTERVAL):
            self._schedule.committed(work.number, work.save.elapsed(), hosts)
        with self._landed(work, _CHOOSE_INTERVAL):
            outcome["turns"] = self._schedule.message()
        with self._landed(work, _CHOOSE_LEVELS):
            step, tags = work.save.step, work.about.tags
            outcome["promote"] = self._promotions.decide(step, work.place, tags)

    def _landed(self, work: Work, doing: str) -> contextlib.AbstractContextManager[None]:
        """Work after `_land`, which commits the step."""
        return after_commit(self._log, work.save.step, doing)

    def _land(self, work: Work, commit: Commit) -> None:
        with work.save.stage("publish"):
            raw = commit.encode()
            work.place.store.commit(work.save.step, raw, work.attempt, commit.records)

    def _keep_outcome(self, work: Work, commit: Commit, outcome: dict[str, Any]) -> None:
        """Keep the outcome, which announce() sends when older steps are retired."""
        with self._landed(work, "encode the outcome for the other ranks"):
            self._outcome = json.dumps(outcome).encode()

    # -- the others ------------------------------------------------------------------------

    def _wait(self, work: Work, attempt: str) -> Mapping[str, Any] | None:
        """The outcome from rank 0; None if none came, and the step is committed."""
        try:
            with work.save.stage("wait for rank 0"):
                told = self.peers.outcome(work.number, work.save.elapsed())
                outcome: dict[str, Any] = json.loads(told)
        except PeerFailedError:
            raise
        except Exception as error:
            # Rank 0 may have been lost after it committed, before it announced the outcome.
            if not self._is_there(work, attempt, error):
                raise
            with after_commit(self._log, work.save.step, _LEARN):
                self._claims.forget(work.number)
                self._look_for_note()  # otherwise the next failure finds it
            return None
        return outcome

    def _is_there(self, work: Work, attempt: str, error: Exception) -> bool:
        """Whether the step is committed. `error`: why this rank has to look for it."""
        try:
            return self._confirm(work, attempt)
        except StorageError as unread:
            if PUBLISHED in unread.facts:
                raise
            if isinstance(error, StateholdError):
                error.with_fact("looked for the step", unread.summary)
            return False

    def _confirm(self, work: Work, attempt: str) -> bool:
        return work.place.store.confirm(work.save.step, attempt)

    # -- all -------------------------------------------------------------------------------

    def _message(self, work: Work, digests: Mapping[str, str], raw: bytes) -> bytes:
        """The message to rank 0 when this rank's part is durable."""
        own = {
            "step": work.save.step,
            "bytes": work.plan.save.file_bytes,
            "host": socket.gethostname(),
            "record": [len(raw), sha256(raw)],
            "digests": digests,
            "version": work.version,
            "claims": message(self.peers.rank, work.comparisons, work.fingerprints),
        }
        return json.dumps(own).encode()

    def _settle(self, work: Work, outcome: Mapping[str, Any]) -> None:
        """After the outcome: nothing, because the step is committed."""

    def _take(self, work: Work, outcome: Mapping[str, Any]) -> None:
        """The step is committed on all ranks."""
        step = work.save.step
        with after_commit(self._log, step, _LEARN):
            self._claims.learn(work.number, lesson_of(outcome["lesson"]))
        with after_commit(self._log, step, _CHOOSE_LEVELS):
            number, names = outcome["promote"]
            work.promote = number, names
        with after_commit(self._log, step, _CHOOSE_INTERVAL):
            self._schedule.learn(outcome["turns"])
        with after_commit(self._log, step, "record how evenly the ranks write"):
            spreads = (Spread(**outcome["balance"][which]) for which in ("ranks", "nodes"))
            work.save.record(balance=Balance(*spreads))


def _is_missing(error: BaseException) -> bool:
    """Whether a file or a directory was not there: to be written, or to be read."""
    if isinstance(error, StorageError):
        return error.errno == errno.ENOENT
    return isinstance(error, MissingFileError)


def _check_alike(messages: Sequence[Mapping[str, Any]], key: str, summary: str) -> None:
    for rank, each in enumerate(messages):
        if each[key] != messages[0][key]:
            raise PeerFailedError(rank, summary).with_fact(
                key, f"expected {messages[0][key]}, as on rank 0, got {each[key]}"
            )


def _shared(lesson: Lesson) -> tuple[Shared, ...]:
    """The equal tensors that each of several meshes saved in this step."""
    return tuple(
        Shared(Ranks.of(rank for mesh in found.meshes for rank in mesh.ranks), found.equal)
        for found in lesson.values()
        if len(found.meshes) > 1 and found.equal
    )


# -- a level of several hosts ----------------------------------------------------------------------


def publisher_of(
    peers: Peers | None, levels: Levels, claims: Claims, schedule: Schedule, log: BackgroundLog
) -> Publisher:
    """The publisher for the saves of this process."""
    descent = Descent(levels.near, lambda: levels.began_from)
    if peers is None:
        return Publisher(descent, levels.promotions, schedule, log)
    kind = Together if levels.hosts is None else Across
    return kind(peers, claims, descent, levels.promotions, schedule, log)


class Across(Together):
    """One of several ranks that save into a level that each host has for itself: D3 to D7 in two
    rounds.

        record -> D3 sealed -> D4 arrive -> rank 0: gather, judge, post the manifest, conclude
            -> the first rank of each host: D5 to D7 in its host's store -> all meet: committed

    A step is committed when every host has published the same manifest. If a rank is lost between
    the rounds, or a host cannot publish, the save fails on all ranks, and the error names the rank.
    Some hosts may have published such a step. It does not count, and the next save removes it
    (levels/hosts/place). Older steps are retired only after the second round. If the job turns out
    to be on one host, this class does what Together does.
    """

    def announce(self, work: Work) -> None:
        if not work.place.is_apart:
            super().announce(work)

    def _land(self, work: Work, commit: Commit) -> None:
        if not work.place.is_apart:
            super()._land(work, commit)

    def _landed(self, work: Work, doing: str) -> contextlib.AbstractContextManager[None]:
        # At a level that each host has for itself, the second round commits.
        return contextlib.nullcontext() if work.place.is_apart else super()._landed(work, doing)

    def _keep_outcome(self, work: Work, commit: Commit, outcome: dict[str, Any]) -> None:
        super()._keep_outcome(work, commit, outcome)
        if work.place.is_apart:
            # It names the records of all ranks, so only the first rank of each host reads it.
            raw = commit.encode()
            outcome["manifest"] = sha256(raw)
            self.peers.post(MANIFEST_NAME, raw)
            self.peers.conclude(work.number, json.dumps(outcome).encode())

    def _confirm(self, work: Work, attempt: str) -> bool:
        return not work.place.is_apart and super()._confirm(work, attempt)

    def _settle(self, work: Work, outcome: Mapping[str, Any]) -> None:
        """The second round."""
        place, step = work.place, work.save.step
        if not place.is_apart:
            return
        save = outcome["manifest"]
        rounds = CommitRounds(self.peers, "save", work.number, f"while publishing step {step}")
        with work.save.stage("publish"):
            rounds.publish(
                place, lambda: place.store.commit(step, self._posted(step, save), work.attempt)
            )
        with after_commit(self._log, step, "note where its files are"):
            place.landed(step, save, range(self.peers.world_size))

    def _posted(self, step: int, save: str) -> bytes:
        """The manifest of this save. Rank 0 posts no other one before all have published it."""
        raw = self.peers.peek(MANIFEST_NAME)
        if raw is None or sha256(raw) != save:
            raise lost_leader(f"post the manifest of step {step}")
        return raw


# -- work after a commit ---------------------------------------------------------------------------
# This work may fail, and the step stays committed. The error is logged, together with what is safe,
# and the rest of the work continues. Rank 0 announces the commit in any case.


@contextlib.contextmanager
def after_commit(log: BackgroundLog, step: int, doing: str) -> Iterator[None]:
    """Run work that follows the commit of `step`; log its error instead of raising it.

    doing: completes "could not ..." in the log.
    """
    try:
        yield
    except BaseException as error:
        log.error("step %d is committed and safe; could not %s\n%s", step, doing, _text(error))


def _text(error: BaseException) -> str:
    """The error, with its traceback if it is not one of statehold's own."""
    if isinstance(error, StateholdError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


# -- the step that the run began from --------------------------------------------------------------
# Each step of a run says from which step of another run the run began. A run keeps its newest steps
# only, so the first one cannot be the only one that knows.
#
# The rank that commits asks once, before its first commit. It asks no levels that are not
# directories, because a save would wait for them. A manifest that cannot be read is no reason to
# fail a save: an older step knows the same.


class Descent:
    """near: the levels of the run that are directories, the nearest first. restored: the step that
    a run without steps began from by restore(source=...), if any."""

    def __init__(
        self, near: Sequence[DirectoryPlace], restored: Callable[[], Origin | None]
    ) -> None:
        self._near = near
        self._restored = restored

    @cached
    def parent(self) -> Origin | None:
        """None if the run began with nothing."""
        said = next(self._said(), None)
        return self._restored() if said is None else said.parent

    def _said(self) -> Iterator[About]:
        """What the steps of the run say, the newest step of the nearest level first."""
        for place in self._near:
            with contextlib.suppress(StateholdError):
                for step in reversed(place.steps()):
                    with contextlib.suppress(StateholdError):
                        raw = place.manifest(step)
                        yield Manifest.decode(raw, f"{place.name}: step {step}").about
