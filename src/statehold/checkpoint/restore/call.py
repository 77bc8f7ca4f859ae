"""One call of restore(), by all ranks together: from the levels of a run to a live state.

    ready?     no rank has an error to raise, and all have the same levels
    gate       no save still copies a byte of the state
    nearest    the steps of all levels; a run that has none begins with that of its parent. Or the
               steps of another run (source), which is only read
    choose     the requested step, or the newest intact one, as rank 0 lists the committed steps
    match      the live state with the step; nothing changes yet
    read       every wanted byte, verified, into place
    finish     the plain values
    after      the levels and the cadence continue from that step; damaged steps are set aside. A
               step of another run changes nothing but where a run without steps began

Invariants: after `match` and after `read` the ranks agree: all continue, or none does. No rank
changes a byte before all ranks have matched. A step counts as restored only when all ranks have
read and verified it, from the same save of it. Any error on one rank is an error on all, except
damage. Another run is only read. No lock is taken there and nothing changes, because its job may go
on. A step that it retires, or saves again, is noticed as in a run of one's own.

Not here: matching (tensors/kinds), which bytes (read_plan), which copy of them (steps/nearest),
agreeing (ranks/rounds); a run that begins with a step of another as its own
(checkpoint/levels/forking).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from statehold.checkpoint.levels.forking import fork_into
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.specs import check_same, described
from statehold.checkpoint.restore.choice import Choice, chosen
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.checkpoint.save.call import Saver
from statehold.checkpoint.telemetry.watch import RestoreWatch
from statehold.errors import (
    OVERWRITTEN,
    CorruptionError,
    PeerFailedError,
    StateholdError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
    UsageError,
    latest,
    no_such_step,
    shown,
    storage_error,
)
from statehold.format.entries import About, Origin, check_origin
from statehold.format.saved import SavedStep
from statehold.format.selection import EVERYTHING, Answer, RestoreReport, Selection, check_answers
from statehold.observe.background_log import log_once
from statehold.options.paths import check_step
from statehold.process.warn import logger, warn_caller
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import USUAL, MismatchElsewhere, called, everyone, led, pooled, together
from statehold.steps.directories import misnamed
from statehold.steps.nearest import Nearest, Next, StepChanged
from statehold.steps.shelf import DirectoryShelf
from statehold.tensors.destinations import Destination, check_shared, destinations_of
from statehold.tensors.devices import Devices
from statehold.tensors.graph import transfer_into
from statehold.tensors.kinds import check_takes_values, finish, prepare
from statehold.tensors.matching import Restoration, mismatch
from statehold.tensors.stored import Wanted

if TYPE_CHECKING:
    from statehold._core import Engine

# -- the call --------------------------------------------------------------------------------------


Choose: TypeAlias = Callable[[SavedStep], Selection]


def set_aside(
    levels: Levels, failed: Mapping[int, CorruptionError], confirmed: Collection[int], restored: int
) -> None:
    """Rename the damaged steps that the restore has skipped; all ranks, before any continues.

    Otherwise a rank would find them newer than its next save. A step that is not `confirmed` stays,
    because another job may be saving it again.
    """
    peers = levels.peers
    together(peers, lambda: levels.promotions.wait(None))
    places = everyone(peers, lambda: [levels.quarantine(n, n in confirmed) for n in failed])
    levels.forget(failed)
    for (step, error), kept in zip(failed.items(), places[0], strict=True):
        text = f"step {step} is damaged; step {restored} was restored instead. "
        warn_caller(f"{text}The damaged step was kept as {kept}.\n{error}")


def check_source(source: str | None, levels: Levels) -> None:
    """Raises UsageError if the source is the run itself, or no step can record its path."""
    if source is None:
        return
    check_origin(source)
    if os.path.realpath(source) == os.path.realpath(levels.run):
        raise UsageError(
            "the source of a restore is another run",
            facts={"run": levels.run},
            hint="leave source out; step= is a step of the run itself",
        )


@dataclass(eq=False)
class RestoreCalls:
    """restore() with the open parts of a session.

    claim: locks every directory that has a step, if this rank leads. report: the report of the last
        call.
    """

    parts: Saver
    claim: Callable[[int], bool]
    report: RestoreReport | None = None

    def __post_init__(self) -> None:
        self.levels, self.peers = self.parts.levels, self.parts.peers
        self.runtime = self.parts.runtime
        self.parent = self.runtime.options.origin  # the step that a run without steps begins from

    def restore(self, state: Mapping[str, Any], request: Request) -> int | None:
        """Load the step that is asked for; returns its number, or None if the run has none."""
        choose = self._wait_ready(state, request)
        if request.source is not None:
            return self._restore_from(request.source, state, request.choice, choose)
        nearest = self.levels.nearest(self.parts.pipeline.drain)
        if self.parent is not None:
            self._check_none()
            if led(self.peers, partial(self._begin, nearest)):
                nearest = self.levels.nearest(self.parts.pipeline.drain)
        restorer, failed = self._load(nearest, state, request.choice, choose, self.claim)
        if self.report is None:
            self._check_none()
            if self.peers is None or self.peers.rank == 0:
                log_once(misnamed(self.runtime.fs, self.levels.run))
            return None
        restored = self.report.step
        self.parts.schedule.turns.last_step = restored
        self.levels.restored(restored, nearest.served(restored))
        if restorer.was_intact:  # else the next save writes all files again
            self.parts.sharing.restored = restored
        if failed:
            set_aside(self.levels, failed, restorer.confirmed, restored)
        return restored

    def _check_none(self) -> None:
        """Raise on all ranks if another one sees steps where all should, and rank 0 sees none."""

        def seen() -> bool:
            self.levels.check_there()
            shared = [place for place in self.levels.near if not place.is_of_hosts]
            return bool(Nearest(shared, self.levels.run).steps())

        sees, run = everyone(self.peers, seen), self.levels.run
        if not sees[0] and (hint := unseen(sees)):
            raise StorageError("cannot find a step", errno=errno.ENOENT, path=run, hint=hint)

    def _restore_from(
        self, run: str, state: Mapping[str, Any], choice: Choice, choose: Choose
    ) -> int:
        """Load a step of another run. That run is only read: no step is claimed or set aside."""
        nearest = Nearest([DirectoryShelf(self.runtime.fs, run, "source")], run)
        _, failed = self._load(nearest, state, choice, choose, lambda _: False)
        if self.report is None:
            found = "no step" if self.runtime.fs.is_dir(run) else "no such directory"
            facts, hint = {"run": run, "found": found}, misnamed(self.runtime.fs, run) or None
            raise StepNotFoundError("no step is committed in this run", facts=facts, hint=hint)
        restored = self.report.step
        self.report = replace(self.report, source=run)
        self.levels.began_from = Origin(nearest.run, restored, nearest.saves.opened(restored))
        for damaged, error in failed.items():
            text = f"step {damaged} of {run} is damaged; step {restored} was restored instead"
            warn_caller(f"{text}.\n{error}")
        return restored

    def _begin(self, nearest: Nearest) -> bool:
        """Rank 0: begin the run with the step of its parent, unless it has steps or saves one."""
        if self.parent is None or self.levels.near[0].is_prepared or nearest.steps():
            return False
        run, step = self.parent.run, self.parent.step
        if step is None and not self.parent.is_newest:
            step = chosen(DirectoryShelf(self.runtime.fs, run), Choice.of(self.parent))
        fork_into(self.levels, run, step)
        return True

    def _wait_ready(self, state: Mapping[str, Any], request: Request) -> Choose:
        """Returns what of a step is restored, once it is open."""
        if self.peers is not None:
            call = f"restore({', '.join(request.choice.asked)})"
            of_rank_0 = called(self.peers, call, lambda: described(self.parts.specs))

        def check() -> Choose:
            self.parts.trainer.raise_failures()
            check_takes_values(state)
            if self.peers is not None:
                check_same(self.parts.specs, of_rank_0)
            check_source(request.source, self.levels)
            selection = request.selection
            if selection is None:
                return transfer_into(state, alone=self.peers is None)
            return lambda _: selection  # before any step is open

        choose = together(self.peers, check)
        self.parts.trainer.gate.wait()
        self.parts.trainer.gate.streams.join()
        return choose

    def _load(
        self,
        nearest: Nearest,
        state: Mapping[str, Any],
        choice: Choice,
        choose: Choose,
        claim: Callable[[int], bool],
    ) -> tuple[Restorer, dict[int, CorruptionError]]:
        """The restore that was done, and the damaged steps that were skipped."""
        runtime = self.runtime
        with self.parts.watch.restore() as watch:
            restorer = Restorer(
                nearest, runtime.engine, runtime.devices, self.peers, state, choose, watch, claim
            )
            step = choice.step
            try:
                self.report, failed = (
                    restorer.first_intact(choice) if step is None else restorer.only(step)
                )
            except StateholdError as error:
                if restorer.has_begun_to_read:
                    error.with_fact(OVERWRITTEN, PARTLY)
                raise
            watch.end(self.report, failed)
        return restorer, failed


# -- what the caller asks for ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """selection: None is the prefix that the model shares with the step. source: another run, whose
    step is read; None is the run itself."""

    choice: Choice
    selection: Selection | None
    source: str | None = None


def requested(
    choice: Choice, source: str | os.PathLike[str] | None, prefix: bool, selection: Selection
) -> Request:
    """The arguments of Checkpointer.restore() as one value. Raises UsageError."""
    named = None if source is None else check_step(source, "the source")
    if named is not None and not named.is_newest and choice != Choice():
        raise UsageError(
            "a step is given twice",
            facts={"source": os.fspath(source or ""), "also given": "step, best or tag"},
            hint="leave one of them out",
        )
    if not isinstance(prefix, bool):
        raise UsageError("prefix is True or False", facts={"got": shown(prefix)})
    if prefix and (selection.has_patterns or not selection.strict or selection.cast):
        raise UsageError(
            "prefix=True chooses what is restored, so only, skip, rename, strict and cast cannot",
            hint="restore twice: once with prefix=True, and once with what else you need",
        )
    chosen = choice if named is None or named.is_newest else Choice.of(named)
    return Request(chosen, None if prefix else selection, None if named is None else named.run)


# -- restoring -------------------------------------------------------------------------------------
# Damage: if a copy of a file that one rank reads is bad, all ranks begin again without that copy,
# while there is another one. Damage beyond that makes all ranks try the next older step.
#
# A writer may save the step again, or retire it, during the restore. After every failure the ranks
# check whether the step is still the one that they opened. If it is not, they list the steps and
# begin again. They believe in damage if they find it once more under the lock of the run, where no
# other process can change the step. Without the lock the step is skipped, and stays.
#
# A rank that is at its place again reads its own record first, which is enough if the layout is the
# same. If that does not match on some rank, all ranks read the records of all.

# A writer that saves one step again and again must not keep a reader for ever.
BEGINNINGS_MAX = 100
PARTLY = "may be partly overwritten: restore a step before training on"


@dataclass(frozen=True, slots=True)
class Matched:
    """A step that fits the live state, with the actions to do after its bytes were read."""

    saved: SavedStep
    restoration: Restoration
    reading: ReadPlan
    unexpected: tuple[str, ...]


class Restorer:
    """One restore into one live state.

    choose: what of a step is restored.
    claim: locks every directory that has a step, if this rank leads; False if another job has a
        lock. `confirmed`: the steps that were then found damaged under the lock.
        `beginnings` counts how often a step was read again because it had changed. `was_intact`:
        every copy that any rank has read of the restored step. `has_begun_to_read`: into the state.
    """

    def __init__(
        self,
        steps: Nearest,
        engine: Engine,
        devices: Devices,
        peers: Peers | None,
        state: Mapping[str, Any],
        choose: Callable[[SavedStep], Selection],
        watch: RestoreWatch,
        claim: Callable[[int], bool],
    ) -> None:
        self._saved = steps
        self._claim = claim
        self.confirmed: set[int] = set()
        self.beginnings = 0
        self.was_intact = True
        self.has_begun_to_read = False
        self._engine = engine
        self._devices = devices
        self._peers = peers
        self._rank = peers.rank if peers else 0
        self._ranks = peers.world_size if peers else 1
        self._state = state
        self._choose = choose
        self._selection = EVERYTHING  # until a step is open
        self._watch = watch

    def first_intact(
        self, choice: Choice
    ) -> tuple[RestoreReport | None, dict[int, CorruptionError]]:
        """Restore what is meant; the second value are the damaged steps that were skipped."""
        failed: dict[int, CorruptionError] = {}
        asked: set[int] = set()
        while remaining := [step for step in self._ordered(choice) if step not in failed]:
            step = remaining[-1]
            try:
                return self.step(step), failed
            except StepChanged as changed:
                self._begin_anew(step, changed)
            except CorruptionError as error:
                if step in asked or not self._claimed(step):
                    failed[step] = error
                asked.add(step)
        if failed:
            newest = failed.pop(max(failed))
            raise newest.with_fact("also damaged", latest(failed)) if failed else newest
        return None, failed

    def only(self, step: int) -> tuple[RestoreReport, dict[int, CorruptionError]]:
        """Restore this step and no other."""
        while True:
            try:
                return self.step(step), {}
            except StepChanged as changed:
                self._begin_anew(step, changed)
                if step not in (there := self._ordered(Choice())):
                    raise no_such_step(step, self._saved.run, there) from None

    def _begin_anew(self, step: int, changed: StepChanged) -> None:
        self.beginnings += 1
        self._saved.forget(step)
        if self.beginnings > BEGINNINGS_MAX:
            error = storage_error("read a step", errno.ESTALE, self._saved.path(step))
            error.with_fact("found", f"{self.beginnings} times another save of it, or none")
            sees = everyone(self._peers, lambda: step in self._saved.steps())
            hint = "save the same step less often, or restore when nothing saves"
            error.hint = unseen(sees) or hint
            raise error from changed

    def _claimed(self, step: int) -> bool:
        """All ranks: whether nobody else can change the step from now on."""
        if not all(everyone(self._peers, lambda: self._claim(step))):
            return False
        self.confirmed.add(step)
        self._saved.forget(step)
        return True

    def step(self, step: int) -> RestoreReport:
        """Restore this step."""
        self.was_intact = True
        with self._saved.protect(step):
            try:
                read = partial(self._read_through, step)
                matched = self._saved.from_any_copy(step, read, self._after)
                # A rank that fails here fails alone: all bytes are in place.
                with self._watch.stage("values", step=step):
                    finish(matched.restoration)
            except (CorruptionError, UsageError) as error:
                error.with_fact("step", step)
                others = [other for other in self._saved.steps() if other != step]
                raise error.with_fact("other steps", latest(others)) from None
        other_ranks = matched.saved.world_size != self._ranks
        frozen = matched.reading.frozen()
        if frozen is not None:
            frozen = set(map(self._selection.renamed, frozen))
        for doubt in matched.restoration.doubts(other_ranks=other_ranks, frozen=frozen):
            warn_caller(doubt)
        return replace(matched.restoration.report, unexpected=matched.unexpected)

    def _read_through(self, step: int) -> Matched:
        with self._watch.stage("plan", step=step):
            matched = self._match(step)
        with self._watch.stage("read", step=step):
            together(self._peers, lambda: self._read_here(step, matched))
        return matched

    def _after(self, step: int, error: Exception) -> Next:
        """What all ranks do after a failure. All of them have opened the same save."""
        mine = self._saved.after(step, error)
        following = Next(max(everyone(self._peers, lambda: mine)))
        self.was_intact &= following in (Next.AGAIN, Next.GIVE_UP)
        return following

    def _ordered(self, choice: Choice) -> list[int]:
        """The steps that are meant, as rank 0 sees them, the first choice last; all committed ones
        for Choice()."""
        if choice.best is None and choice.tag is None:  # what steps say does not matter
            with self._watch.stage("discover"):
                return led(self._peers, self._saved.steps)
        with self._watch.stage("choose"):
            return led(self._peers, lambda: choice.ordered(self._said(), self._saved.run))

    def _said(self) -> dict[int, About]:
        """What the committed steps say of themselves."""
        found = {step: self._saved.said(step) for step in self._saved.steps()}
        for step in [step for step, about in found.items() if about is None]:
            logger.warning(
                "the manifest of step %d cannot be read, so its metrics and tags are not known; "
                "choosing from the other steps",
                step,
            )
        return {step: about for step, about in found.items() if about is not None}

    # -- matching --------------------------------------------------------------------------

    def _match(self, step: int) -> Matched:
        saved: SavedStep | None = None

        def first() -> Matched:
            nonlocal saved
            with self._watch.stage("open", step=step):
                saved = self._saved.open(step, self._rank, self._ranks)
            return self._matched(saved)

        try:
            matched, answers = self._pooled(step, first)
        except StateholdError as error:
            is_about_layouts = isinstance(error, StateMismatchError | MismatchElsewhere)
            if not is_about_layouts or saved is None or saved.widened() is saved:
                raise
            matched, saved, answers = self._in_all_records(step, saved)
        else:
            # This rank's own record may lack something that another one has, so all are read.
            if any(each.lacks for each in answers) and saved is not None and saved.is_narrow:
                matched, saved, answers = self._in_all_records(step, saved)
        check_answers(answers)
        return self._judged(matched, saved)

    def _in_all_records(
        self, step: int, saved: SavedStep
    ) -> tuple[Matched, SavedStep, list[Answer]]:
        wide = saved.widened()
        matched, answers = self._pooled(step, lambda: self._matched(wide))
        return matched, wide, answers

    def _pooled(self, step: int, match: Callable[[], Matched]) -> tuple[Matched, list[Answer]]:
        """The match of this rank, and the answers of the selection on each rank.

        Raises on all ranks if they have opened different saves of the step.
        """

        def describe(matched: Matched) -> list[Any]:
            return [self._saved.saves.opened(step), astuple(matched.restoration.answer)]

        matched, answers = pooled(self._peers, match, describe)
        for rank, (save, _) in enumerate(answers):
            if save != answers[0][0]:
                raise PeerFailedError(rank, f"it opened another save of step {step} than rank 0")
        return matched, [Answer(*answer) for _, answer in answers]

    def _matched(self, saved: SavedStep) -> Matched:
        self._selection = self._choose(saved)
        alone = self._peers is None or saved.is_narrow
        restoration = prepare(
            self._state,
            saved,
            selection=self._selection,
            rank=self._rank if self._peers else None,
            alone=alone,
            world=self._ranks,
        )
        reading = ReadPlan(
            saved,
            restoration.destinations,
            complete=self._selection.is_everything,
            streamed=restoration.streamed,
            rank=self._rank,
            ranks=self._ranks,
            notes=True,
        )
        if restoration.shared:
            check_shared(restoration.shared, partial(self._read_into, saved))
        return Matched(saved, restoration, reading, tuple(restoration.unexpected))

    def _judged(self, matched: Matched, saved: SavedStep | None) -> Matched:
        """The entries of the step that no rank takes, which no rank can tell alone."""
        if self._peers is None or saved is None or saved.is_narrow:
            return matched
        names = sorted(saved.tensors)
        unused = [name not in matched.restoration.used for name in names]
        values = [name for name in matched.unexpected if name not in saved.tensors]
        common, values = USUAL.hold(self._peers, [_bits(unused).hex(), values], _in_common)
        tensors = (
            name
            for name, is_unused in zip(names, _of_bits(bytes.fromhex(common)), strict=False)
            if is_unused and self._selection.takes(self._selection.renamed(name))
        )
        unexpected = (*tensors, *values)
        if unexpected and self._selection.strict:
            problems = [(name, "an entry that no rank has in its state") for name in unexpected]
            raise mismatch(problems, matched.restoration)
        return replace(matched, unexpected=unexpected)

    # -- reading ---------------------------------------------------------------------------

    def _read_here(self, step: int, matched: Matched) -> None:
        self.has_begun_to_read = True
        self._read_all(step, matched.reading)

        def fill(wanted: Sequence[Wanted]) -> None:
            self._read_into(matched.saved, destinations_of(wanted))

        for stream in matched.restoration.streams:
            stream(fill)

    def _read_into(self, saved: SavedStep, found: Sequence[Destination]) -> None:
        plan = ReadPlan(saved, found, rank=self._rank, ranks=self._ranks)
        self._read_all(saved.step, plan)

    def _read_all(self, step: int, plan: ReadPlan) -> None:
        reading = plan.start(self._engine, partial(self._saved.find, step))
        try:
            with self._watch.reading(step, reading.job):  # each piece is verified and placed
                reading.finish(self._devices.load)
        finally:  # also after an early error: nothing more is put into the state
            reading.job.cancel()


# -- what ranks tell each other --------------------------------------------------------------------


def unseen(sees: Sequence[bool]) -> str:
    """What to tell if only some ranks see steps; `sees` is by rank. "" if all or none do."""
    if len(set(sees)) < 2:
        return ""
    return (
        f"rank {sees.index(False)} does not see the steps of this run, and rank {sees.index(True)} "
        "does: is the run directory mounted on the host of each rank? The steps are untouched"
    )


def _bits(flags: Sequence[bool]) -> bytes:
    """Eight flags a byte, the first one lowest."""
    value = sum(1 << index for index, flag in enumerate(flags) if flag)
    return value.to_bytes(-(-len(flags) // 8), "little")


def _of_bits(raw: bytes) -> Iterator[bool]:
    return (bool(byte >> bit & 1) for byte in raw for bit in range(8))


def _in_common(found: list[Any]) -> list[Any]:
    """The tensors that no rank uses, and the values that none takes."""
    unused, values = zip(*found, strict=True)
    common = int.from_bytes(bytes.fromhex(unused[0]), "little")
    for each in unused[1:]:
        common &= int.from_bytes(bytes.fromhex(each), "little")
    bits = common.to_bytes(len(unused[0]) // 2, "little")
    nowhere = set(values[0]).intersection(*values[1:])
    return [bits.hex(), sorted(nowhere)]
