"""Promotion: committed steps are copied from the first level to the others, in the background.

    decide   when a step is committed at the first level, rank 0 says which levels want it
    start    every rank then keeps the step, and copies its part on a thread
    meet     all parts are there, or one rank failed: commit at the level, or give up

Invariants: at most one step is under way to a level. A busy level gets the next step that is
committed once it is free. A rank that starts a copy does not wait for an earlier one: the copy is
queued. A level that fails costs a warning: training continues, the step stays at its source, and
the next one is tried again. An older step is never put next to a newer one.

Not here: when a level wants a step (cadence), the bytes (steps/copying), a level's commit
(steps/target).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from statehold.checkpoint.cadence.costs import Interval
from statehold.checkpoint.cadence.every import Cadence, parse_every
from statehold.checkpoint.levels.commit_rounds import CommitRounds
from statehold.checkpoint.levels.specs import Level
from statehold.checkpoint.telemetry.watch import CopyWatch, LevelWatch
from statehold.errors import (
    ClosedError,
    CorruptionError,
    NoSpaceError,
    PeerFailedError,
    PeerLostError,
    StateholdError,
    StepOrderError,
    StorageError,
    UsageError,
    WaitTimeout,
    named,
    storage_error,
)
from statehold.format.entries import sha256
from statehold.options.keep import kept_of
from statehold.process.warn import let_go
from statehold.process.worker import Flag, Worker, yield_processor
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import USUAL, Round, led
from statehold.steps.copying import Copy, part_of
from statehold.steps.shelf import Shelf
from statehold.steps.target import Carriers, DirectoryPlace, Share, Target, last_saved_s

# -- the copies to a level -------------------------------------------------------------------------
# Ranks meet under the number of the copy, which rank 0 counts and announces. So a rank that missed
# a copy fails that copy and no other. All ranks share out a copy by what they know when it begins.
# Copies on other hosts go with a step to its level, and are complete only when the level has the
# step.


# The suffix of a level's name for its copies on other hosts.
COPIES = ".copies"

# The number of a round of copies, and the levels that get one.
Copies = tuple[int, Sequence[str]]
NO_COPIES: Copies = (0, ())


@dataclass(frozen=True, slots=True)
class LevelStatus:
    """The status of a level.

    newest: the newest step at the level. Rank 0 has looked there. For a level behind the first, the
        other ranks know only the copies that they made since the last restore or flush.
    copying, bytes_done, bytes_total: the step that is being copied, and this rank's part of it.
    error: why the last copy failed; None again after a copy has succeeded.
    interval: the interval of the level and the reason for it, if rank 0 has chosen it ("auto").
    """

    name: str
    newest: int | None = None
    copying: int | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    error: StateholdError | None = None
    interval: Interval | None = None


@dataclass(slots=True)
class _Order:
    """A copy to make: of a step at `source`, under a number that is the same on all ranks.

    carriers, share: who copies which files, as all ranks know it when the copies begin.
    level: for copies on other hosts, the copy of the step to their level, if that has just begun;
        its result says whether the step got there.
    end: the same of this copy. is_over: for the thread that trains. A signal may interrupt it, and
        a Future would keep its lock.
    """

    step: int
    number: int
    source: DirectoryPlace
    carriers: Carriers
    share: Share
    level: Future[bool] | None
    end: Future[bool] = field(default_factory=Future)
    is_over: bool = False


@dataclass(slots=True)
class _Copied:
    """The result of a copy: the manifest of the step, and the ranks that had its files, by
    writer."""

    manifest: bytes = b""
    carriers: list[int] = field(default_factory=list)


class Promoter:
    """Copies steps to one level, one after the other, on a thread of its own."""

    def __init__(
        self,
        spec: Level,
        place: Target,
        peers: Peers | None,
        give_way: Callable[[], None],
        watch: LevelWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place = place
        self._clock = clock
        self._peers = peers
        self._watch = watch
        self._keep = kept_of(spec.keep)
        self._log = watch.log
        self._rank = peers.rank if peers else 0
        self._round = f"promote {place.name}"
        self.throttle = Throttle(spec.rate, give_way)
        self._guard = threading.Lock()
        self.status = LevelStatus(place.name)
        self._look()
        self._cadence = self._cadence_of(spec)
        self._thread = Worker(f"statehold-{place.name}")  # as its lane in a trace is called
        self._thread.submit(partial(yield_processor, NICENESS))
        self._under_way: _Order | None = None
        self._logged: tuple[int, type[Exception]] | None = None  # the newest failure
        self._begun_with = b""  # the manifest of the step that is being copied
        self._landed = ""  # sha256 of the manifest of the last complete copy
        self.copied = 0  # copies that got there
        self.took_s = 0.0  # the newest of them

    def _cadence_of(self, spec: Level) -> Cadence:
        newest = self.status.newest
        every, last_s = parse_every(spec.every), self._clock()
        if self._rank == 0 and every.seconds is not None:
            last_s = last_saved_s(self.place, last_s)
        cadence = Cadence(every, newest, last_s)
        if self._rank == 0 and self.place.is_owed(newest):
            cadence.given_up(newest)  # a step that was due and not copied stays due
        return cadence

    @property
    def level(self) -> str:
        """The name of the level; for copies on other hosts, that of their level."""
        return self.place.name.removesuffix(COPIES)

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.is_over

    def wants(self, step: int, at: DirectoryPlace, tags: Sequence[str] = ()) -> bool:
        """Whether the level should get this step, which was saved `at` a level with `tags`, now.
        For rank 0, which decides for all."""
        if not self.place.takes_steps:
            return False
        # A step that is saved again is copied after its earlier copy, which would stay otherwise.
        is_again = step in (self.status.newest, self.status.copying)
        is_pinned = self._keep is not None and self._keep.pins(step, tags)
        is_due = self.level == at.name or self._cadence.is_due(step, self._clock())
        return is_pinned or (is_due and (is_again or not self.is_busy))

    def every(self, interval: Interval) -> None:
        """From now on take steps in this interval. For rank 0."""
        self._cadence.every(interval.steps)
        self._set(interval=interval)

    def lacks(self, step: int, source: DirectoryPlace) -> bool:
        """Whether the level lacks this step, as `source` has it, and has no newer one.

        For rank 0, with nothing under way.
        """
        if not self.place.takes_steps:
            return False
        newest = self.status.newest
        if newest is None or newest < step:
            return True
        try:  # a step that was saved again has another manifest
            return newest == step and self.place.manifest(step) != source.manifest(step)
        except (StorageError, CorruptionError):
            return True

    def start(
        self,
        step: int,
        number: int,
        source: DirectoryPlace,
        carriers: Carriers,
        level: Promoter | None = None,
    ) -> None:
        """Begin to copy a step, which stays at `source` until the copy has ended.

        `number` is that of the copy: equal on all ranks, and above those of earlier copies.
        carriers: those of the step at `source`, before any copy of it has begun.
        level: for copies on other hosts, what has just begun to copy the step to their level.
        """
        share = self.place.share(step, self._rank)
        there = level._under_way if level else None
        order = _Order(step, number, source, carriers, share, there.end if there else None)
        kept = contextlib.ExitStack()
        kept.enter_context(source.protect(step))
        self._cadence.taken(step, self._clock())
        if step == self.status.newest and self.place.is_apart:
            self._look()  # the copies that the level has may be those of another save
        if not self.is_busy:
            self._set(copying=step, bytes_done=0, bytes_total=0)
        try:
            self._thread.submit(partial(self._take, order, kept))
        except RuntimeError:  # the interpreter ends, and so has the thread
            kept.close()
            self._failed(order, None, ClosedError("the program ends"))
        else:
            self._under_way = order

    def landed(self, step: int) -> None:
        """`step` was saved into this level itself."""
        self._cadence.taken(step, self._clock())
        self._set(newest=step, error=None)
        self._watch.landed(step)

    def wait(self, timeout_s: float | None) -> None:
        """Return once nothing is under way. Raises WaitTimeout."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if self.is_busy and not self._thread.passed(until):
            raise WaitTimeout(
                f"step {self.status.copying} did not reach level {self.place.name} in time",
                facts={"waited": f"{timeout_s} s", "copied": f"{self.status.bytes_done} bytes"},
                hint="the copy goes on in the background",
            )

    def hurry(self) -> None:
        """The next step is due, whatever the cadence. For rank 0."""
        self._cadence.given_up(None)

    def forget(self, steps: Collection[int]) -> None:
        """These steps are at no level any more. With nothing under way."""
        if self.status.newest in steps:
            self._look()
            self._cadence.given_up(self.status.newest)

    def stop(self) -> None:
        """Let copies under way, and later ones, end unfinished. Returns at once."""
        self.throttle.stop()
        self.place.stop()

    def close(self) -> None:
        """End the copies under way, finished or not."""
        self.stop()
        self._thread.close()

    def look(self) -> None:
        """Steps may have come or gone, as by a census: look again which steps the level has."""
        if not self.is_busy:
            self._look()

    def _look(self) -> None:
        """Rank 0, which decides: the newest step at the level."""
        newest = None
        if self._rank == 0:
            try:
                newest = max(self.place.steps(), default=None)
            except StorageError as error:  # the restore or copy that fails because of it reports it
                self._set(error=error)
        self._set(newest=newest)
        if newest is not None:
            self._watch.newest(newest)

    # -- on the thread ---------------------------------------------------------------------

    def _take(self, order: _Order, kept: contextlib.ExitStack) -> None:
        is_there = False
        try:
            is_there = self._run(order, kept)
        finally:
            order.is_over = True
            order.end.set_result(is_there)

    def _run(self, order: _Order, kept: contextlib.ExitStack) -> bool:
        """Copy a step. Returns whether it is at the level now."""
        self._set(copying=order.step, bytes_done=0, bytes_total=0)
        self._begun_with = b""
        attempt, begin_s, is_there = None, time.monotonic(), False
        try:
            with kept, self._watch.copy(order.step, self._counts) as watch:
                attempt = self._peers.attempt(order.number) if self._peers else None
                self._publish(order, attempt, watch)
        except Exception as error:
            self._failed(order, attempt, error)
        else:
            self._set(newest=order.step, copying=None, error=None)
            self._logged = None
            self.took_s = time.monotonic() - begin_s
            self.copied += 1
            is_there = True
        with self._watch.stage("retain"):
            if is_there:  # otherwise it would fail for the same reason
                self._retain(self.place)
            self._retain(order.source)  # it may have been the copy that held a step
        return is_there

    def _counts(self) -> tuple[int, int]:
        return self.status.bytes_done, self.status.bytes_total

    def _retain(self, place: Target) -> None:
        if not place.leads:
            return
        try:
            if warning := place.retain():
                self._log.warning("%s", warning)
        except StateholdError as error:  # only old steps are left over; the next copy tries again
            self._log.warning("old steps stay at level %s\n%s", place.name, error)

    def _publish(self, order: _Order, attempt: str | None, watch: CopyWatch) -> None:
        """Copy this rank's part; when all have, commit."""
        failure: Exception | None = None
        step, copied = order.step, _Copied()
        try:
            self._copy(order, attempt, watch, copied)
            _check_level(order)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure = error

        def commit() -> None:
            with watch.stage("commit", step=step):
                self.place.commit(step, attempt, copied.manifest)

        rounds = CommitRounds(self._peers, self._round, order.number, f"while copying step {step}")
        message = part_message(copied.manifest, failure, step, self._landed)
        with watch.stage("meet", step=step) if self._peers else contextlib.nullcontext():
            check, then = partial(check_parts, step), rounds.at(self.place, commit)
            self.place.learn(rounds.gather(message, check, failure, then) or ())
            try:
                rounds.publish(self.place, commit)
            except StateholdError:
                self.place.missed_end(step, copied.manifest)
                raise
        self._landed = sha256(copied.manifest)
        self.place.landed(step, self._landed, copied.carriers)

    def _copy(self, order: _Order, attempt: str | None, watch: CopyWatch, copied: _Copied) -> None:
        step, source = order.step, order.source
        with watch.stage("prepare", step=step):
            self.place.prepare(self._peers)
            if self._rank == 0:
                self._check_order(step)

        def share(saved: int, manifest: bytes) -> list[int]:
            copied.carriers = order.carriers(saved)
            return order.share(manifest, copied.carriers)

        files = source.source(step)
        with watch.stage("plan", step=step):
            part = part_of(files, step, share)
        copied.manifest = self._begun_with = part.manifest
        self._set(bytes_total=part.nbytes)
        self.throttle.begin()
        self.place.take(Copy(step, attempt, part, files, partial(self._before, watch), watch))

    def _check_order(self, step: int) -> None:
        """If the level could not be read when the run was opened, ask it now."""
        newest = max(self.place.steps(), default=step)
        if newest > step:
            raise StepOrderError(
                f"level {self.place.name} has step {newest}, which is newer than step {step}",
                hint=f"restore(state) loads step {newest}; continue from there. To keep both, "
                f"give this run another directory for the level",
            )

    def _before(self, watch: CopyWatch, nbytes: int) -> None:
        watch.limiting(lambda: self.throttle(nbytes))
        self._set(bytes_done=self.status.bytes_done + nbytes)

    def _failed(self, order: _Order, attempt: str | None, error: Exception) -> None:
        step, source = order.step, order.source
        if self.place.leads and not is_resumable(error):
            with contextlib.suppress(StateholdError):
                self.place.drop(attempt)
        let_go(error)
        self._cadence.given_up(self.status.newest)
        if self._was_saved_again(step, source):
            error = storage_error("copy a step: it was saved again", errno.ESTALE, "")
            self._set(copying=None, error=error)
            self._log.info("step %d was saved again while it was copied to level %s; copying it "
            "again", step, self.place.name)  # fmt: skip
            return
        self._set(copying=None, error=named(error, f"while copying step {step}"))
        before, self._logged = self._logged, (step, type(error))
        # flush() and close() retry.
        if not isinstance(error, ClosedError) and before != self._logged:
            self._log.warning(
                "step %d did not reach level %s; it stays at level %s, and the next step is "
                "tried\n%s",
                step, self.place.name, source.name, error,
            )  # fmt: skip

    def _was_saved_again(self, step: int, source: DirectoryPlace) -> bool:
        """Whether the source has another save of the step than the copy began with."""
        if not self._begun_with:
            return False
        try:
            return source.manifest(step) != self._begun_with
        except (StorageError, CorruptionError):
            return False

    def _set(self, **changes: object) -> None:
        with self._guard:
            self.status = replace(self.status, **changes)  # type: ignore[arg-type]


class Promotions:
    """All levels but the first, to which saves go (`first`)."""

    def __init__(
        self,
        first: DirectoryPlace,
        promoters: Sequence[Promoter],
        peers: Peers | None,
        watch: LevelWatch,
    ) -> None:
        self._first = first
        self._watch = watch  # of the first
        self.promoters = tuple(promoters)
        self._promoters = {promoter.place.name: promoter for promoter in promoters}
        self._peers = peers
        self._last = 0  # number of a copy
        self._last_step: int | None = None

    def end_with(self, step: int) -> None:
        """Every rank: no step follows this one, so it goes to all levels."""
        self._last_step = step

    def decide(self, step: int, at: DirectoryPlace, tags: Sequence[str] = ()) -> Copies:
        """Rank 0: the levels that get a step that was just committed at the level `at`."""
        if at is self._first:
            self._watch.landed(step)
        if not self.promoters:
            return NO_COPIES
        others = [promoter for promoter in self.promoters if promoter.place is not at]
        for promoter in self.promoters:
            if promoter.place is at:
                promoter.landed(step)
        is_last = step == self._last_step
        names = [
            each.place.name
            for each in others
            if each.place.takes_steps and (is_last or each.wants(step, at, tags))
        ]
        names = [name for name in names if self._is_with_its_copies(name, names)]
        return self._next(), self._with_their_level(names, [at.name])

    def _is_with_its_copies(self, name: str, names: Sequence[str]) -> bool:
        """A level to which a step is copied gets it together with the copies of the level."""
        copies = self._promoters.get(self._promoters[name].level + COPIES)
        return copies is None or not copies.place.takes_steps or copies.place.name in names

    def _with_their_level(self, names: Sequence[str], having: Sequence[str]) -> list[str]:
        """Without copies of levels that do not get a step, and are not among those `having` it."""
        return [name for name in names if self._promoters[name].level in (*names, *having)]

    def start(self, step: int, copies: Copies, source: DirectoryPlace) -> None:
        """Every rank, with the decision of rank 0."""
        number, names = copies
        if not names:
            return
        carriers = source.carriers(step, self._peers.world_size if self._peers else 1)
        for name in names:
            if name not in self._promoters:
                raise UsageError("this rank has no such level", facts={"level": name})
            promoter = self._promoters[name]
            has_level = promoter.level != name and promoter.level in names
            level = self._promoters[promoter.level] if has_level else None
            promoter.start(step, number, source, carriers, level)

    def status(self) -> list[LevelStatus]:
        return [promoter.status for promoter in self.promoters]

    def is_copying(self, step: int, place: DirectoryPlace) -> bool:
        """Whether a copy of this step to this level is under way."""
        promoter = self._promoters.get(place.name)
        return promoter is not None and promoter.is_busy and promoter.status.copying == step

    def catch_up(self, within: Round = USUAL) -> None:
        """All ranks together, with nothing under way: begin to copy the newest step to levels
        without it."""
        step, copies, source = led(self._peers, self._lacking, within)
        found = (place for place in self._sources() if place.name == source)
        self.start(step, copies, next(found, self._first))

    def wait(self, timeout_s: float | None) -> None:
        """Return once nothing is under way. Raises WaitTimeout."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for promoter in self.promoters:
            promoter.wait(None if until is None else max(0.0, until - time.monotonic()))

    def hurry(self) -> None:
        """Rank 0: the next step goes to every level."""
        for promoter in self.promoters:
            promoter.hurry()

    def have(self, step: int) -> bool:
        """Rank 0, with nothing under way: whether every level got this step."""
        taking = [each for each in self.promoters if each.place.takes_steps]
        found = [promoter.status for promoter in taking]
        return all(each.newest == step and each.error is None for each in found)

    def forget(self, steps: Collection[int]) -> None:
        """Every rank, with nothing under way: these steps are at no level any more."""
        for promoter in self.promoters:
            promoter.forget(steps)

    def stop(self) -> None:
        """Let all copies end unfinished. Returns at once."""
        for promoter in self.promoters:
            promoter.stop()

    def close(self) -> None:
        for promoter in self.promoters:
            promoter.close()

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _lacking(self) -> tuple[int, Copies, str]:
        """The newest step, the levels without it, and its source."""
        newest = max((step for place in self._sources() for step in readable(place)), default=None)
        if newest is None:
            return 0, NO_COPIES, self._first.name
        source = self._nearest(newest)
        others = [each for each in self.promoters if each.place is not source]
        names = [each.place.name for each in others if each.lacks(newest, source)]
        having = [source.name, *(name for name in self._promoters if name not in names)]
        return newest, (self._next(), self._with_their_level(names, having)), source.name

    def _sources(self) -> list[DirectoryPlace]:
        """The sources of a step: the first level, and directories that all ranks see."""
        places = [promoter.place for promoter in self.promoters]
        directories = [place for place in places if isinstance(place, DirectoryPlace)]
        return [self._first, *(place for place in directories if not place.is_apart)]

    def _nearest(self, step: int) -> DirectoryPlace:
        having = (place for place in self._sources() if step in readable(place))
        return next(having, self._first)


def _check_level(order: _Order) -> None:
    """Copies on other hosts count beside the files of their level: wait until these are there."""
    if order.level is not None and not order.level.result():
        raise storage_error("keep copies of a step: their level did not get it", errno.ESTALE, "")


def readable(place: Shelf) -> list[int]:
    """The steps at a level; none, if it cannot be read."""
    try:
        return place.steps()
    except StorageError:
        return []


# -- the parts of all ranks ------------------------------------------------------------------------
# A copy is committed only if all ranks have copied their parts of the same save. A step that is
# saved again meanwhile has two manifests, and ranks may have read either. Copied files are kept for
# the next attempt, unless the level is full or the source damaged.


def part_message(manifest: bytes, failure: Exception | None, step: int, landed: str) -> Any:
    """The message of a rank: its part of the step with this manifest is there, or it has failed.

    landed: sha256 of the manifest of the last copy that is complete, as this rank knows it; or "".
    """
    reason = "" if failure is None else str(named(failure, f"while copying step {step}"))
    return {
        "reason": reason,
        "resumable": failure is not None and is_resumable(failure),
        "manifest": sha256(manifest),
        "landed": landed,
    }


class PartFailedError(PeerFailedError):
    """The same for rank 0, which knows whether the copy `is_resumable` on all ranks."""

    def __init__(self, rank: int, reason: str, is_resumable: bool) -> None:
        super().__init__(rank, reason)
        self.is_resumable = is_resumable


def check_parts(step: int, parts: Sequence[Any]) -> list[str]:
    """Rank 0: raises PeerFailedError if the parts do not make a step.

    Returns which copies are complete, as any rank knows it: sha256 of their manifests.
    """
    failed = [(rank, part) for rank, part in enumerate(parts) if part["reason"]]
    if failed:
        rank, first = failed[0]
        raise PartFailedError(rank, first["reason"], all(part["resumable"] for _, part in failed))
    for rank, part in enumerate(parts):
        if part["manifest"] != parts[0]["manifest"]:
            raise PeerFailedError(rank, f"step {step} was saved again while it was copied")
    return sorted({part["landed"] for part in parts} - {""})


def is_resumable(error: Exception) -> bool:
    """Whether the copied files are worth keeping for another copy of the same step."""
    if isinstance(error, PartFailedError):
        return error.is_resumable
    if isinstance(error, NoSpaceError):
        return False
    return isinstance(error, StorageError | ClosedError | PeerLostError)


# -- the speed of a copy ---------------------------------------------------------------------------


BURST_S = 0.25
NICENESS = 10  # a tenth of the processor if the training wants all of it; never nothing


class Throttle:
    """Call it with a number of bytes before they are moved; it returns when they may pass.

    give_way: returns when no save needs the processors and the memory more; may be replaced at any
        time. Raises ClosedError after stop(). stopped: set by stop(), and awaited in a delay.

    Copies never exceed the limit, even if earlier time was unused. They make up for short delays. A
    waiting thread is woken at once when the copy is to stop.
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        give_way: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self.give_way = give_way
        self._clock = clock
        self.stopped = Flag()
        self._free_s = 0.0  # when the bytes that have passed so far are paid for

    def begin(self) -> None:
        """A copy begins; unused time before it does not count."""
        self._free_s = max(self._free_s, self._clock())

    def __call__(self, nbytes: int) -> None:
        self.give_way()
        if self._bytes_per_s is not None:
            self._free_s = max(self._free_s, self._clock() - BURST_S)
            delay_s = self._free_s - self._clock()
            self._free_s += nbytes / self._bytes_per_s
            if delay_s > 0:
                self.stopped.wait(delay_s)
        if self.stopped.is_set:
            raise ClosedError("a copy to another level was stopped")

    def stop(self) -> None:
        """Let no more bytes pass."""
        self.stopped.set()
