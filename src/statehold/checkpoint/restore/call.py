"""One call of restore(), by all ranks together: from the levels of a run to a live state.

    ready?     no rank has an error to raise, and all have the same levels
    gate       no save still copies a byte of the state
    nearest    the steps of all levels; a run that has none begins with that of its parent. Or the
               steps of another run (source), which is only read
    restore    the requested step, or the newest intact one
    after      the levels and the cadence continue from that step; damaged steps are set aside. A
               step of another run changes nothing but where a run without steps began

Invariants: another run is only read. No lock is taken there and nothing changes, because its job
may go on. A step that it retires, or saves again, is noticed as in a run of one's own.

Not here: how one step gets into the state (restoring); a run that begins with a step of another as
its own (checkpoint/levels/forking).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.forking import fork_into
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.specs import Level, check_same, described
from statehold.checkpoint.restore.choice import Choice, chosen
from statehold.checkpoint.restore.restoring import Restorer, unseen
from statehold.checkpoint.save.gate import Trainer
from statehold.checkpoint.telemetry.watch import Watch
from statehold.errors import (
    CorruptionError,
    RunBusyError,
    StepNotFoundError,
    StorageError,
    UsageError,
    shown,
)
from statehold.format.entries import Origin, check_origin
from statehold.format.saved import SavedStep
from statehold.format.selection import RestoreReport, Selection
from statehold.io.runtime import Runtime
from statehold.observe.background_log import log_once
from statehold.options.paths import NamedStep, check_step
from statehold.process.warn import warn_caller
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import called, everyone, led, together
from statehold.steps.directories import misnamed
from statehold.steps.nearest import Nearest
from statehold.steps.shelf import DirectoryShelf
from statehold.tensors.graph import transfer_into
from statehold.tensors.kinds import check_takes_values

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
    places = everyone(
        peers, lambda: [_quarantined(levels, step, step in confirmed) for step in failed]
    )
    levels.forget(failed)
    for (step, error), kept in zip(failed.items(), places[0], strict=True):
        text = f"step {step} is damaged; step {restored} was restored instead. "
        warn_caller(f"{text}The damaged step was kept as {kept}.\n{error}")


def _quarantined(levels: Levels, step: int, is_confirmed: bool) -> str:
    """The new place of the damaged step.

    Its old place if the run belongs to another job or may not be changed: the state is still
    restored.
    """
    if is_confirmed:
        with contextlib.suppress(RunBusyError, StorageError):
            return levels.quarantine(step)
    return levels.store.path(step)


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
    """The parts that restore() uses.

    drain: ends the saves under way. claim: locks every directory that has a step, if this rank
        leads.
    goes_on: tells the saving side which step was restored.
    parent: the step that a run without steps begins from.
    report: the report of the last call.
    """

    specs: Sequence[Level]
    runtime: Runtime
    levels: Levels
    peers: Peers | None
    schedule: Schedule
    watch: Watch
    trainer: Trainer
    drain: Callable[[], None]
    claim: Callable[[int], bool]
    goes_on: Callable[[int], None]
    parent: NamedStep | None = None
    report: RestoreReport | None = None

    def restore(self, state: Mapping[str, Any], request: Request) -> int | None:
        """Load the step that is asked for; returns its number, or None if the run has none."""
        choose = self._wait_ready(state, request)
        if request.source is not None:
            return self._restore_from(request.source, state, request.choice, choose)
        nearest = self.levels.nearest(self.drain)
        if self.parent is not None:
            self._check_none()
            if led(self.peers, partial(self._begin, nearest)):
                nearest = self.levels.nearest(self.drain)
        restorer, failed = self._load(nearest, state, request.choice, choose, self.claim)
        if self.report is None:
            self._check_none()
            if self.peers is None or self.peers.rank == 0:
                log_once(misnamed(self.runtime.fs, self.levels.run))
            return None
        restored = self.report.step
        self.schedule.turns.goes_on_from(restored)
        self.levels.restored(restored, nearest.served(restored))
        if restorer.was_intact:  # else the next save writes all files again
            self.goes_on(restored)
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
            hint = misnamed(self.runtime.fs, run) or None
            raise StepNotFoundError(
                "no step is committed in this run", facts={"run": run}, hint=hint
            )
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
        call = f"restore({', '.join(request.choice.asked)})"
        of_rank_0 = called(self.peers, call, lambda: described(self.specs))

        def check() -> Choose:
            self.trainer.raise_failures()
            check_takes_values(state)
            check_same(self.specs, of_rank_0)
            check_source(request.source, self.levels)
            if request.selection is None:
                return transfer_into(state, alone=self.peers is None)
            return partial(_chosen, request.selection)

        choose = together(self.peers, check)
        self.trainer.gate.wait()
        self.trainer.gate.join_streams()
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
        with self.watch.restore() as watch:
            restorer = Restorer(
                nearest, runtime.engine, runtime.devices, self.peers, state, choose, watch, claim
            )
            self.report, failed = restorer.chosen(choice)
            watch.end(self.report, failed)
        return restorer, failed


def _chosen(selection: Selection, _: SavedStep) -> Selection:
    """What is chosen before any step is open."""
    return selection


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
