"""Where a save goes: the first level whose storage takes its files, the same on all ranks.

    every rank    D1 at a level: opens the file, with all its blocks and those of the documents
    all ranks     a round: if every rank has its file, the save stays at this level. Otherwise all
                  ranks try the next level, which rank 0 chooses

A process that is alone decides for itself. Several ranks hold this round in the background, and
only if more than one level takes saves. No rank writes a byte before all have their files, because
bytes that have left a buffer cannot be written again. Every save tries the first level again.

Invariants: all ranks of a save are at the same level. A rank that fails for another reason, or has
given the save up, ends the round for all. A save does not pass a nearer level that has the step
already, because that level would hide the new save. The log says once why a level was passed over,
until it takes saves again.
Not here: the writing (pipeline), how long ranks wait for each other (ranks/peers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.levels import specs
from statehold.checkpoint.save.writes import manifest_bytes, record_bytes
from statehold.errors import (
    NoSpaceError,
    PeerFailedError,
    RunBusyError,
    StateholdError,
    StorageError,
    UsageError,
    named,
)
from statehold.format.manifest import record_name
from statehold.format.saved import MANIFEST_NAME
from statehold.process.warn import let_go
from statehold.ranks.rounds import Round

if TYPE_CHECKING:
    from statehold._core import File
    from statehold.checkpoint.levels.hosts.discovery import Hosts
    from statehold.checkpoint.levels.promoting import Promotions
    from statehold.checkpoint.levels.specs import Level
    from statehold.checkpoint.save.handle import Work
    from statehold.observe.background_log import BackgroundLog
    from statehold.ranks.peers import Peers
    from statehold.steps.target import DirectoryPlace

ROUND = "open"
ENTRY_BYTES = 300  # of a rank in a manifest, at most
LEVELS_MAX = 1000  # so that ranks with different levels count their rounds alike
OpenFile = tuple["File", bool]  # whether it was reused
Failure = tuple[bool, str]  # whether the level refused the save, and the text


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a level.

    taken: the save stays here. Otherwise `rank` failed with `reason`. If `is_refusal`, the level
        refused the save, and `next` is the index of the level to try, if there is one.
    """

    taken: bool = True
    rank: int = 0
    reason: str = ""
    is_refusal: bool = False
    next: int | None = None


class LevelChoice:
    """The choice of a level for each save; used by the commit thread.

    places: those of the `levels` that can take saves. peers: None for a process that is alone.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        places: Sequence[DirectoryPlace],
        promotions: Promotions,
        peers: Peers | None,
        hosts: Hosts | None,
        log: BackgroundLog,
    ) -> None:
        self._levels = levels
        self._places = places
        self._promotions = promotions
        self._peers = peers
        self._log = log
        self._rank = peers.rank if peers else 0
        self._met = -1  # the newest save whose round this rank has joined
        self._hosts = hosts
        self._asked = -1  # the newest save for which this rank has joined the discovery of hosts
        self._has_announced = False
        self._meets = peers is not None and len(places) > 1
        self._asks_late = len(levels) == 1 and hosts is None
        self._unlike: StateholdError | None = None
        self._was_logged = False  # that the first level takes no steps
        self.first_error: StateholdError | None = None  # why it takes none, until it does

    def open(self, work: Work) -> OpenFile:
        """D1 of a save, at the first level that takes it on all ranks: `work.place` from now on.
        If several ranks save, `work.attempt` makes the names of its directories unique."""
        if self._peers is not None:
            work.attempt = self._peers.attempt(work.number)
        if self._places[0].may_lack_room:
            self._places[0].make_room()
        self.check_levels(work.number)
        self._asked = work.number
        if self._hosts is not None:  # the rank that leads a host prepares its levels only then
            self._hosts.discover()
        causes: list[StateholdError] = []
        at = 0
        while True:
            work.place = self._places[at]
            opened, failure = self._open_here(work)
            is_first = work.number == 0 and self._rank and self._asks_late
            if is_first and isinstance(failure, NoSpaceError):
                self.check_levels(0, late=True)  # rank 0 has made room when it answers
                work.place.abandon(work.save.step, work.attempt)
                opened, failure = self._open_here(work)
            try:
                verdict = Verdict()
                if self._meets or failure is not None:
                    verdict = self._judged(work, at, failure)
                if verdict.taken and opened is not None:
                    self.took(work, causes)
                    return opened
            except BaseException:
                _close(opened, work)
                raise
            _close(opened, work)
            causes.append(_cause(verdict, failure))
            let_go(causes[-1])
            if at == 0 and verdict.is_refusal:
                self.first_error = causes[0]
            if verdict.next is None:
                raise causes[0 if verdict.is_refusal else -1]
            work.place.abandon(work.save.step, work.attempt)
            at = verdict.next

    def give_up(self, number: int, error: StateholdError) -> None:
        """A save has failed on this rank, perhaps before its file was opened: no rank need wait."""
        if self._peers is None:
            return
        if number == 0 and self._rank == 0 and not self._has_announced:
            self._peers.fail(0, error, specs.ROUND)
        if self._unlike and self._hosts is None:  # the others may have levels of each host
            self._hosts = _no_hosts(self._peers)
        if self._hosts is not None and (self._unlike or number > self._asked):
            self._hosts.give_up(error)
        if (self._meets or self._unlike) and number > self._met:
            self._peers.fail(self._round(number, 0), error, ROUND)

    def check_levels(self, number: int, *, late: bool = False) -> None:
        """With the first save, check that this rank has the levels of rank 0.

        late: the call after the file is written. With a single level that all ranks see, a rank
            asks only then, and waits for nobody before.
        """
        if self._peers is None:
            return
        if number == 0 and self._rank == 0 and not late:
            self._peers.conclude(0, specs.described(self._levels).encode(), specs.ROUND)
            self._has_announced = True
        elif number == 0 and self._rank and late == self._asks_late:
            announced = self._peers.announced(specs.ROUND, 0)
            try:
                specs.check_same(self._levels, announced.decode())
            except UsageError as error:
                self._unlike = error
        if self._unlike is not None:
            raise self._unlike.with_traceback(None)

    # -- at one level ----------------------------------------------------------------------

    def _open_here(self, work: Work) -> tuple[OpenFile | None, StateholdError | None]:
        step, plan, place = work.save.step, work.plan.save, work.place
        try:
            # The first one was prepared by the trainer, unless it failed.
            place.prepare(self._peers)
            place.store.begin(step, work.attempt)
            if len(self._places) > 1:  # later, a document without room could not move on
                self._reserve(work)
            opened = place.store.data_file(step, plan.file_name, plan.file_bytes, work.attempt)
            try:
                if work.shared is not None:
                    work.shared.open(place.store, work.attempt)
            except BaseException:
                _close(opened, work)
                raise
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            return None, named(error, f"while opening the file of step {step}")
        return opened, None

    def _reserve(self, work: Work) -> None:
        """Reserve room at the level for the documents that this rank writes."""
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

    def _round(self, number: int, at: int) -> int:
        return number * LEVELS_MAX + at

    def _judged(self, work: Work, at: int, failure: StateholdError | None) -> Verdict:
        if not self._meets:
            return self._decided(work.save.step, at, [_message(failure)])
        assert self._peers is not None
        self._met = work.number

        def decide(failures: list[Any]) -> tuple[Any, ...]:
            return astuple(self._decided(work.save.step, at, failures))

        within = Round(ROUND, self._round(work.number, at))
        return Verdict(*within.hold(self._peers, _message(failure), decide))

    # -- rank 0 ----------------------------------------------------------------------------

    def _decided(self, step: int, at: int, failures: Sequence[Failure | None]) -> Verdict:
        """The verdict from the failures of all ranks at a level."""
        failed = [(*failure, rank) for rank, failure in enumerate(failures) if failure is not None]
        if not failed:
            return Verdict()
        # If the level is not the reason, no other level helps.
        is_refusal, reason, rank = min(failed, key=lambda each: each[0])
        following = self._next(step, at) if is_refusal else None
        return Verdict(False, rank, reason, is_refusal, following)

    def _next(self, step: int, at: int) -> int | None:
        """The level after `at` that can be tried."""
        for index in range(at + 1, len(self._places)):
            place = self._places[index]
            if self._is_nearer(step, index):
                return None  # it would hide a save farther away
            if self._promotions.is_copying(step, place):
                continue  # its directory is in use
            try:  # before other ranks use it
                place.prepare(self._peers)
            except (StorageError, RunBusyError):
                continue
            if place.may_lack_room:
                place.make_room()
            return index
        return None

    def _is_nearer(self, step: int, index: int) -> bool:
        """Whether a nearer level has an earlier save of this step, or cannot be read."""
        try:
            return any(step in each.steps() for each in self._places[:index])
        except StorageError:
            return True

    def took(self, work: Work, causes: Sequence[StateholdError] = ()) -> None:
        """`work.place` takes the save. Log when the first level begins to fail, and when it works
        again."""
        first, step = self._places[0].name, work.save.step
        if self._rank == 0 and causes and not self._was_logged:
            self._log.warning(
                "level %s cannot take step %d; saves go to level %s until it can\n%s",
                first, step, work.place.name, causes[0],
            )  # fmt: skip
        if self._rank == 0 and self._was_logged and not causes:
            self._log.warning("level %s takes steps again, from step %d on", first, step)
        self._was_logged = bool(causes)
        if not causes:
            self.first_error = None


def _no_hosts(peers: Peers) -> Hosts:
    from statehold.checkpoint.levels.hosts.discovery import Hosts, WireExchange

    return Hosts((), peers, WireExchange(""))


def _close(opened: OpenFile | None, work: Work) -> None:
    """Release the blocks of files that are not written after all."""
    if opened is not None:
        opened[0].close()  # no transfer has it yet
    if work.shared is not None:
        work.shared.close_files()


def _is_refusal(error: StateholdError) -> bool:
    """Whether the level fails, so that another level may help."""
    return isinstance(error, StorageError | RunBusyError)


def _message(failure: StateholdError | None) -> Failure | None:
    return None if failure is None else (_is_refusal(failure), str(failure))


def _cause(verdict: Verdict, own: StateholdError | None) -> StateholdError:
    """Why a level was not taken, as an error of this rank."""
    if own is not None and _is_refusal(own) == verdict.is_refusal:
        return own
    return PeerFailedError(verdict.rank, verdict.reason)
