"""Restoring: choose a step, match it with the live state, read it, and agree with the other ranks.

    choose    rank 0 lists the committed steps; the newest is tried first
    match     the live state with the step; nothing changes yet
    read      every wanted byte, verified, into place
    finish    the plain values

Invariants: after `match` and after `read` the ranks agree: all continue, or none does. No rank
changes a byte before all ranks have matched. A step counts as restored only when all ranks have
read and verified it, from the same save of it. Any error on one rank is an error on all, except
damage.

Not here: matching (tensors/kinds), which bytes (read_plan), which copy of them (steps/nearest),
agreeing (ranks/rounds).
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.restore.choice import Choice
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.checkpoint.telemetry.watch import RestoreWatch
from statehold.errors import (
    CorruptionError,
    PeerFailedError,
    StateholdError,
    StateMismatchError,
    UsageError,
    no_such_step,
    storage_error,
)
from statehold.format.entries import About
from statehold.format.selection import EVERYTHING, Answer, RestoreReport, Selection, check_answers
from statehold.process.warn import warn_caller
from statehold.ranks.rounds import USUAL, MismatchElsewhere, everyone, led, pooled, together
from statehold.steps.nearest import Next, StepChanged
from statehold.tensors.destinations import Destination
from statehold.tensors.kinds import finish, prepare
from statehold.tensors.matching import Restoration, mismatch
from statehold.tensors.stored import Wanted

if TYPE_CHECKING:
    from statehold._core import Engine
    from statehold.format.saved import SavedStep
    from statehold.ranks.peers import Peers
    from statehold.steps.nearest import Nearest
    from statehold.tensors.devices import Devices


logger = logging.getLogger("statehold")

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
PARTLY = "may be partly overwritten: restore another step before training on"


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
        lock. After chosen(), `confirmed` are the steps that were found damaged under the lock.
        `beginnings` counts how often a step was read again because it had changed. `was_intact`:
        every copy that any rank has read of the restored step.
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
        self._has_begun_to_read = False
        self._engine = engine
        self._devices = devices
        self._peers = peers
        self._rank = peers.rank if peers else 0
        self._ranks = peers.world_size if peers else 1
        self._state = state
        self._choose = choose
        self._selection = EVERYTHING  # until a step is open
        self._watch = watch

    def chosen(self, choice: Choice) -> tuple[RestoreReport | None, dict[int, CorruptionError]]:
        """Restore what is meant; the second value are the damaged steps that were skipped."""
        return self._first_intact(choice) if choice.step is None else self._only(choice.step)

    def _first_intact(
        self, choice: Choice
    ) -> tuple[RestoreReport | None, dict[int, CorruptionError]]:
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
            newest = self._final(failed.pop(max(failed)))
            raise newest.with_fact("also damaged", listed(failed)) if failed else newest
        return None, failed

    def _only(self, step: int) -> tuple[RestoreReport, dict[int, CorruptionError]]:
        """Restore this step and no other."""
        while True:
            try:
                return self.step(step), {}
            except StepChanged as changed:
                self._begin_anew(step, changed)
                if step not in self._steps():
                    raise no_such_step(step, self._saved.run, self._steps()) from None
            except CorruptionError as error:
                raise self._final(error) from None

    def _final(self, error: CorruptionError) -> CorruptionError:
        """The error that ends this restore."""
        if self._has_begun_to_read:
            error.with_fact("the state", PARTLY)
        return error

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
                raise error.with_fact("other steps", listed(others)) from None
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
        following = self._saved.after(step, error)
        if self._peers is not None:
            mine = json.dumps(following).encode()
            following = Next(json.loads(USUAL.hold(self._peers, mine, _highest)))
        self.was_intact &= following in (Next.AGAIN, Next.GIVE_UP)
        return following

    def _ordered(self, choice: Choice) -> list[int]:
        """The steps that are meant, as rank 0 sees them, the first choice last."""
        if choice.best is None and choice.tag is None:  # what steps say does not matter
            return self._steps()
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

    def _steps(self) -> list[int]:
        """The committed steps, as rank 0 sees them."""
        with self._watch.stage("discover"):
            return led(self._peers, self._saved.steps)

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
        return Matched(saved, restoration, reading, tuple(restoration.unexpected))

    def _judged(self, matched: Matched, saved: SavedStep | None) -> Matched:
        """The entries of the step that no rank takes, which no rank can tell alone."""
        if self._peers is None or saved is None or saved.is_narrow:
            return matched
        names = sorted(saved.tensors)
        unused = [name not in matched.restoration.used for name in names]
        values = [name for name in matched.unexpected if name not in saved.tensors]
        message = json.dumps([_bits(unused).hex(), values]).encode()
        common, values = json.loads(USUAL.hold(self._peers, message, _in_common))
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
        self._has_begun_to_read = True
        self._read_all(step, matched.reading)

        def fill(wanted: Sequence[Wanted]) -> None:
            found = [
                Destination(each.name, each.memory, external=False, box=each.box, shared=False)
                for each in wanted
            ]
            plan = ReadPlan(matched.saved, found, rank=self._rank, ranks=self._ranks)
            self._read_all(step, plan)

        for stream in matched.restoration.streams:
            stream(fill)

    def _read_all(self, step: int, plan: ReadPlan) -> None:
        reading = plan.start(self._engine, partial(self._saved.find, step))
        try:
            with self._watch.reading(step, reading.job):  # each piece is verified and placed
                reading.finish(self._devices.load)
        finally:  # also after an early error: nothing more is put into the state
            reading.job.cancel()


# -- what ranks tell each other --------------------------------------------------------------------


def listed(steps: Iterable[int]) -> str:
    """Steps for a message."""
    shown = sorted(steps)
    return ", ".join(map(str, shown[-8:])) + (f" ({len(shown)} in all)" if shown else "none")


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


def _highest(messages: Sequence[bytes]) -> bytes:
    return json.dumps(max(json.loads(each) for each in messages)).encode()


def _in_common(messages: Sequence[bytes]) -> bytes:
    """The tensors that no rank uses, and the values that none takes."""
    unused, values = zip(*map(json.loads, messages), strict=True)
    common = int.from_bytes(bytes.fromhex(unused[0]), "little")
    for each in unused[1:]:
        common &= int.from_bytes(bytes.fromhex(each), "little")
    bits = common.to_bytes(len(unused[0]) // 2, "little")
    nowhere = set(values[0]).intersection(*values[1:])
    return json.dumps([bits.hex(), sorted(nowhere)]).encode()
