"""Where a save goes: the first level whose storage takes its files, on all ranks alike.

    every rank    D1 at a level: the file is opened, with all its blocks, and those of the documents
    all           meet: opened on every rank, or on to the next level together (rank 0 says which)

A process that is alone decides for itself. Several ranks meet under the number of the save, in the
background, and only where there is more than one level that takes saves: no rank writes a byte
before all have their file, because what was copied out of a buffer cannot be written again.
The first level is tried again with every save.

Invariants: all ranks of a save are at the same level; a rank that fails otherwise, or has given the
save up, ends the meeting for all. Never past a nearer level that has the step already: it would
hide the new one. Why a level was passed over is said once, until it takes saves again.
Not here: what is written there (pipeline), how long ranks wait for each other (ranks/peers).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING

from statehold.checkpoint.levels import alike
from statehold.checkpoint.save.writes import manifest_bytes, record_bytes
from statehold.errors import (
    PeerFailedError,
    RunBusyError,
    StateholdError,
    StorageError,
    UsageError,
    named,
)
from statehold.format.manifest import record_name
from statehold.format.saved import MANIFEST_NAME
from statehold.process.tracebacks import let_go
from statehold.ranks.rounds import Round

if TYPE_CHECKING:
    from statehold._core import File
    from statehold.checkpoint.levels.hosts.discovery import Hosts
    from statehold.checkpoint.levels.places import DirectoryPlace
    from statehold.checkpoint.levels.promoting import Promotions
    from statehold.checkpoint.levels.specs import Level
    from statehold.checkpoint.save.work import Work
    from statehold.observe.background_log import BackgroundLog
    from statehold.ranks.peers import Peers

ROUND = "open"
ENTRY_BYTES = 300  # what a manifest says of one rank, at most
LEVELS_MAX = 1000  # so that ranks with different levels count their meetings alike
OpenFile = tuple["File", bool]  # whether it was reused
Failure = tuple[bool, str]  # whether it is a refusal of the level, and the text


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about a level: `taken`, or why not: `rank` met with `reason`, which may be a
    refusal of the level; then `next` is the index of the level to try, if there is one."""

    taken: bool = True
    rank: int = 0
    reason: str = ""
    is_refusal: bool = False
    next: int | None = None


class LevelChoice:
    """`places`: those of the `levels` that can take saves. peers: None for a process that is alone.
    Used by the commit thread."""

    def __init__(
        self,
        levels: Sequence[Level],
        places: Sequence[DirectoryPlace],
        promotions: Promotions,
        peers: Peers | None,
        hosts: Hosts,
        log: BackgroundLog,
    ) -> None:
        self._levels = levels
        self._places = places
        self._promotions = promotions
        self._peers = peers
        self._log = log
        self._rank = peers.rank if peers else 0
        self._met = -1  # the newest save about which this rank has met the others
        self._hosts = hosts
        self._asked = -1  # the newest save with which this rank came to meet the hosts
        self._has_announced = False
        self._unlike: StateholdError | None = None
        self._was_said = False  # that the first level takes no steps
        self.first_error: StateholdError | None = None  # why it takes no steps, until it does

    def open(self, work: Work) -> OpenFile:
        """D1 of a save, at the first level that takes it on all ranks; `work.place` is that one."""
        self.check_levels(work.number)
        self._asked = work.number
        self._hosts.discover()  # who leads a host prepares its levels only after that
        causes: list[StateholdError] = []
        at = 0
        while True:
            work.place = self._places[at]
            opened, failure = self._open_here(work)
            try:
                verdict = self._judged(work, at, failure)
                if verdict.taken and opened is not None:
                    self._note(work, causes)
                    return opened
            except BaseException:
                _close(opened)
                raise
            _close(opened)
            causes.append(_cause(verdict, failure))
            let_go(causes[-1])
            if at == 0 and verdict.is_refusal:
                self.first_error = causes[0]
            if verdict.next is None:
                raise causes[0 if verdict.is_refusal else -1]
            work.place.abandon(work.save.step, work.attempt)
            at = verdict.next

    def give_up(self, number: int, error: StateholdError) -> None:
        """A save has failed on this rank, maybe before its file was opened: others may wait."""
        if self._peers is None:
            return
        if number == 0 and self._rank == 0 and not self._has_announced:
            self._peers.fail(0, error, alike.ROUND)
        if self._unlike or (self._hosts.are_asked and number > self._asked):
            self._hosts.give_up(error)
        if (self._meets or self._unlike) and number > self._met:
            self._peers.fail(self._round(number, 0), error, ROUND)

    def check_levels(self, number: int, *, late: bool = False) -> None:
        """With the first save: whether this rank has the levels of rank 0. One that has a single
        level that all ranks see writes before it asks (`late`): it waits for nobody until then."""
        if self._peers is None:
            return
        if number == 0 and self._rank == 0 and not late:
            self._peers.announce(alike.ROUND, 0, alike.described(self._levels).encode())
            self._has_announced = True
        elif number == 0 and self._rank and late == self._asks_late:
            announced = self._peers.announced(alike.ROUND, 0)
            try:
                alike.check_same(self._levels, announced.decode())
            except UsageError as error:
                self._unlike = error
        if self._unlike is not None:
            raise self._unlike.with_traceback(None)

    @property
    def _asks_late(self) -> bool:
        return len(self._levels) == 1 and not self._hosts.are_asked

    # -- at one level ----------------------------------------------------------------------

    def _open_here(self, work: Work) -> tuple[OpenFile | None, StateholdError | None]:
        step, plan, place = work.save.step, work.plan.save, work.place
        try:
            # The first one was prepared by the trainer, unless it failed.
            place.prepare(self._peers.token if self._peers else None)
            place.store.begin(step, work.attempt)
            if len(self._places) > 1:  # what finds no room later cannot go to the next one
                self._reserve(work)
            opened = place.store.data_file(step, plan.file_name, plan.file_bytes, work.attempt)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            return None, named(error, f"while opening the file of step {step}")
        return opened, None

    def _reserve(self, work: Work) -> None:
        """Room at the level for the documents that this rank writes."""
        store, step, attempt = work.place.store, work.save.step, work.attempt
        plan, tree = work.plan, work.tree
        if attempt is None:
            guess = partial(manifest_bytes, plan.save, tree)
            store.reserve(step, None, MANIFEST_NAME, guess)
            return
        ranks = plan.save.world_size
        guess = partial(record_bytes, plan, tree, attempt)
        store.reserve(step, attempt, record_name(plan.save.rank, ranks), guess)
        if store.leads:
            store.reserve(step, attempt, MANIFEST_NAME, lambda: guess() + ENTRY_BYTES * ranks)

    @property
    def _meets(self) -> bool:
        return self._peers is not None and len(self._places) > 1

    def _round(self, number: int, at: int) -> int:
        return number * LEVELS_MAX + at

    def _judged(self, work: Work, at: int, failure: StateholdError | None) -> Verdict:
        if not self._meets:
            return self._decided(work.save.step, at, [_message(failure)])
        assert self._peers is not None
        self._met = work.number

        def decide(messages: Sequence[bytes]) -> bytes:
            failures = [json.loads(each) for each in messages]
            return json.dumps(astuple(self._decided(work.save.step, at, failures))).encode()

        own = json.dumps(_message(failure)).encode()
        agreed = Round(ROUND, self._round(work.number, at)).hold(self._peers, own, decide)
        return Verdict(*json.loads(agreed))

    # -- rank 0 ----------------------------------------------------------------------------

    def _decided(self, step: int, at: int, failures: Sequence[Failure | None]) -> Verdict:
        """What the ranks do that have opened their files at a level, or failed to."""
        failed = [(*failure, rank) for rank, failure in enumerate(failures) if failure is not None]
        if not failed:
            return Verdict()
        # Against what is no refusal no level helps.
        is_refusal, reason, rank = min(failed, key=lambda each: each[0])
        following = self._next(step, at) if is_refusal else None
        return Verdict(False, rank, reason, is_refusal, following)

    def _next(self, step: int, at: int) -> int | None:
        """The level after `at` that can be tried."""
        for index in range(at + 1, len(self._places)):
            place = self._places[index]
            if self._is_nearer(step, index):
                return None  # and would hide what is saved farther away
            if self._promotions.is_copying(step, place):
                continue  # its directory is in use
            try:  # before other ranks come there
                place.prepare(self._peers.token if self._peers else None)
            except (StorageError, RunBusyError):
                continue
            return index
        return None

    def _is_nearer(self, step: int, index: int) -> bool:
        """Whether a level before has an earlier save of this step, or cannot say so."""
        try:
            return any(step in each.steps() for each in self._places[:index])
        except StorageError:
            return True

    def _note(self, work: Work, causes: Sequence[StateholdError]) -> None:
        """Say when the first level begins to fail, and when it works again."""
        first, step = self._places[0].name, work.save.step
        if self._rank == 0 and causes and not self._was_said:
            self._log.warning(
                "level %s cannot take step %d; saves go to level %s until it can\n%s",
                first, step, work.place.name, causes[0],
            )  # fmt: skip
        if self._rank == 0 and self._was_said and not causes:
            self._log.warning("level %s takes steps again, from step %d on", first, step)
        self._was_said = bool(causes)
        if not causes:
            self.first_error = None


def _close(opened: OpenFile | None) -> None:
    """Give back the blocks of a file that is not written after all."""
    if opened is not None:
        opened[0].close()  # no transfer has it yet


def _is_refusal(error: StateholdError) -> bool:
    """Whether it is the level that fails, and another one may not."""
    return isinstance(error, StorageError | RunBusyError)


def _message(failure: StateholdError | None) -> Failure | None:
    return None if failure is None else (_is_refusal(failure), str(failure))


def _cause(verdict: Verdict, own: StateholdError | None) -> StateholdError:
    """Why a level was not taken, as this rank says it."""
    if own is not None and _is_refusal(own) == verdict.is_refusal:
        return own
    return PeerFailedError(verdict.rank, verdict.reason)
