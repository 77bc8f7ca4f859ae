"""One call of save() on the thread that trains: from the state to a job in the pipeline.

    due?      the cadence of the first level, the same on all ranks
    wait      back-pressure: at most two saves are under way
    capture   names, dtypes, addresses and version counters; bytes only of tensors that may change
              soon
    plan      which rank writes what, and where
    start     the engine begins to copy, and the pipeline takes the save

Invariants: a call that fails has begun nothing, and the other ranks get its error. If anything
interrupts the call, even Ctrl-C, the native job ends before the memory that it copies from is
released.

Not here: the background work (pipeline), copies from devices (tensors/devices).
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from statehold._core import hash_memory
from statehold.checkpoint.save.gate import HeldSave
from statehold.checkpoint.save.handle import Passage, Save, Work
from statehold.checkpoint.save.sharing import Sharing
from statehold.checkpoint.save.writes import FileOrder, manifest_bytes, start_write
from statehold.errors import StorageError, TornSnapshot, UsageError, shown
from statehold.format.entries import NAMED, NAMES_MAX, About, is_name
from statehold.format.saved import MANIFEST_NAME
from statehold.layout.claims import Comparison
from statehold.layout.plan import step_of
from statehold.layout.share import PlanCache
from statehold.ranks.membership import ALONE
from statehold.tensors import updates
from statehold.tensors.captured import begin_fingerprints
from statehold.tensors.devices.jobs import JobSource
from statehold.units import GiB

if TYPE_CHECKING:
    from statehold._core import File
    from statehold.checkpoint.agent.starting import Companion
    from statehold.checkpoint.cadence.schedule import Schedule
    from statehold.checkpoint.levels.levels import Levels
    from statehold.checkpoint.levels.specs import Level
    from statehold.checkpoint.save.gate import Trainer
    from statehold.checkpoint.save.level_choice import LevelChoice
    from statehold.checkpoint.save.pipeline import Pipeline
    from statehold.checkpoint.telemetry.watch import Watch
    from statehold.io.runtime import Runtime
    from statehold.layout.claims import Claims
    from statehold.layout.plan import SavePlan
    from statehold.ranks.peers import Peers
    from statehold.tensors.captured import Capture, CapturedTensor


# -- the call --------------------------------------------------------------------------------------


# Of files that are linked, so much is in staging memory at once. Copies of that size keep a device
# busy for longer than a program takes to hand it the update that comes after them.
COMPARED_AT_ONCE = 1 * GiB


@dataclass(eq=False)
class Saver:
    """The open parts of a session, and a call of save() with them.

    peers, rank: None for a process that is alone. trainer: of the Checkpointer, which may have had
        other sessions. All parts except `runtime` and `trainer` end with the session. prepare:
        creates and locks the run directory before the first save.
    """

    run: str
    specs: Sequence[Level]
    trainer: Trainer
    runtime: Runtime
    peers: Peers | None
    watch: Watch
    levels: Levels
    companion: Companion
    claims: Claims
    schedule: Schedule
    level_choice: LevelChoice
    pipeline: Pipeline
    prepare: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.peers.rank if self.peers else None
        self.membership = self.peers.membership if self.peers else ALONE
        self.sharing = Sharing(self.levels.near[0], self.runtime, self.peers)
        self._plans, self._order = PlanCache(self.membership), FileOrder()

    def save(
        self,
        number: int,
        step: int,
        state: Mapping[str, Any],
        about: Callable[[], About],
        *,
        force: bool,
        is_last: Callable[[int], bool],
    ) -> tuple[Save, Work | None]:
        """Begin to save if the step is due. Returns the handle, and the work of the pipeline.

        number: of the call, the same on all ranks. about: what the caller says about the step;
            raises UsageError. is_last: whether this process saves no step after this one.
        """
        gate = self.trainer.gate
        try:
            try:
                step = step_of(step)
            except UsageError:
                self.schedule.turns.call(number, None, wanted=force)
                raise
            # Counted before a refusal, because the other ranks count this call.
            is_due = self.schedule.is_due(
                number,
                step,
                wanted=force or is_last(step),
                is_saving=self.pipeline.newest_step() is not None,
                gate_s=gate.waited_s,
            )
            said = about()
            begun = self._begin(number, step, state, said, is_last) if is_due else None
        except BaseException as error:
            self.pipeline.give_up(number, self.trainer.message(error, self.rank or 0))
            raise
        if begun is None:
            self.trainer.raise_failures()
            return Save(Passage(step, 0.0, is_skipped=True)), None
        work, captured = begun
        self.pipeline.wait_eager(work, captured)
        gate.streams.follow()
        gate.wait_if_unseen(work.save)
        work.save.returned()
        self.schedule.saved(work.save.stats.blocked_s, gate.waited_s)
        return work.handle, work

    def _begin(
        self,
        number: int,
        step: int,
        state: Mapping[str, Any],
        about: About,
        is_last: Callable[[int], bool],
    ) -> tuple[Work, Capture]:
        """Capture, plan, and hand the save over. A save that fails here has not begun."""
        save, gate = Passage(step, time.perf_counter(), self.watch), self.trainer.gate
        try:
            ends = self._wait(save, is_last)
            with updates.noted() as moved:
                captured = self.trainer.capture(save, state, self.rank, self.membership.world)
                try:
                    held = gate.hold_for(save, captured.tensors)
                    if moved and held.copies_from(moved):
                        raise _moved()
                    return self._begin_with(captured, held, number, about, is_last=ends), captured
                except BaseException:
                    captured.release()
                    raise
        except BaseException:
            if not self.pipeline.has(save):
                gate.let_go(save)
            raise

    def _begin_with(
        self, captured: Capture, held: HeldSave, number: int, about: About, *, is_last: bool
    ) -> Work:
        """Plan the save of what was captured, and hand it over."""
        save, structure = held.save, captured.tensors.structure
        with save.stage("plan"):
            specs = structure.specs
            comparisons, version = tuple[Comparison, ...](), ""
            if self.rank is not None:
                known = self.claims.resolve(specs, self.schedule.turns.settled)
                specs, comparisons, version = known.specs, known.comparisons, self.claims.version
            plan = self._plans.get(specs, save.step, captured.frozen)
            plan, shared = self.sharing.split(plan, captured.tensors)
        save.record(
            state_bytes=structure.state_bytes,
            eager_bytes=structure.eager_bytes,
            written_bytes=plan.save.file_bytes + (shared.fresh_bytes if shared else 0),
            tensors=len(captured.tensors),
        )
        names = {name for each in comparisons for name in each.names}
        compared = captured.named(names) if names else []
        self.trainer.watched.append(save)
        work = Work(
            save=save,
            handle=Save(save),
            number=number,
            plan=plan,
            tree=captured.tree,
            capture=captured,
            place=self.levels.near[0],
            comparisons=comparisons,
            version=version,
            fingerprinting=begin_fingerprints(compared, hash_memory) if compared else {},
            register=self.sharing,
            is_last=is_last,
            about=about,
            shared=shared,
            stored=captured.handed_over(),
        )
        self._start(work, held, captured, compared)
        return work

    def _wait(self, save: Passage, is_last: Callable[[int], bool]) -> bool:
        """Return once there is room for another save: whether the process ends with this one.

        The last save does not stop for one before it.
        """
        self.trainer.raise_failures(is_last=is_last(save.step))
        self.prepare()
        with save.stage("wait"):
            self.pipeline.wait_for_room(self.schedule.turns.settled)
        save.record(waited_s=save.elapsed())
        ends = is_last(save.step)
        if ends:
            self.levels.promotions.end_with(save.step)
        self.trainer.raise_failures(is_last=ends)
        near, promoters = self.levels.near, self.levels.promotions.promoters
        known = [self.pipeline.newest_step(), *(each.status.newest for each in promoters)]
        # If the first level is unreachable, saves go to the next one. It is asked when it is back.
        near[0].check_order(save.step, known, may_be_unreachable=len(near) > 1)
        return ends

    def _start(
        self, work: Work, held: HeldSave, captured: Capture, compared: Sequence[CapturedTensor]
    ) -> None:
        """Begin to copy the captured tensors, and hand `work` over: wholly, or not at all.

        If an error or Ctrl-C interrupts this, the native job stops before the memory that it copies
        from is released. Then the handle fails, so nothing waits for it.
        """
        self.watch.save_began()
        try:
            ordered = self._order.ordered(work.plan, captured.tensors)
            self._make_room(work)
            work.save.moving_from = time.perf_counter()
            file = None
            # With new shared files, the commit thread makes all files, at a level that has room.
            if self.levels.store.is_mapped and not (work.shared and work.shared.fresh):
                file = self.ready_file(work.plan.save, work.tree)
            work.is_attached = file is not None
            work.save.record(reused=work.is_attached)
            if work.shared is not None:
                work.shared.start_first()
            work.job = start_write(self.runtime.engine, work.plan.save, ordered, file)
            sources = [JobSource(work.job, ordered.tensors)]
            if work.shared is not None:
                sources = work.shared.start(sources[0])
            if captured.numbers or any(captured.tensors.structure.external):
                work.copies = self.runtime.devices.copies(sources, captured, compared)
            held.passing = work.copies.passing if work.copies else None
            self.pipeline.submit(work)
        except BaseException as error:
            self.pipeline.take_back(work, error)
            raise

    def _make_room(self, work: Work) -> None:
        """Make sure that there is staging memory. A save into memory needs little."""
        if not self.levels.store.is_mapped:
            nbytes = work.plan.save.file_bytes
            if work.shared is not None:
                nbytes += work.shared.fresh_bytes
                nbytes += min(work.shared.compared_bytes, COMPARED_AT_ONCE)
            self.runtime.fit(nbytes, self.pipeline.drain)

    def ready_file(self, plan: SavePlan, tree: Any) -> File | None:
        """A file in memory that is mapped already: the state is copied straight into it.

        None: the commit thread makes the file. It also does if there is no room for the documents,
        because the save then goes to the next level.
        """
        store = self.levels.store
        is_in_use = self.pipeline.uses(plan.step)  # its directory is in use
        if self.rank is not None or is_in_use or not store.has_ready(plan.file_name):
            return None
        try:
            store.begin(plan.step)
            if len(self.levels.near) > 1:
                guess = partial(manifest_bytes, plan, tree)
                store.reserve(plan.step, None, MANIFEST_NAME, guess)
            file, _ = store.data_file(plan.step, plan.file_name, plan.file_bytes)
        except StorageError:  # the commit thread gets the same error, and handles it
            store.abandon(plan.step)
            return None
        return file


def _moved() -> TornSnapshot:
    return TornSnapshot(
        "another thread took the memory of a tensor away while save() looked at the state",
        hint="share or resize tensors on the thread that saves, or not during save()",
    )


# -- what the caller says of a step ----------------------------------------------------------------
# What is accepted here can be written into a manifest, and read back the same. NaN and infinity are
# values: a run may well have them. Nothing here waits for a device.


def labels(metrics: Mapping[str, float] | None, tags: Sequence[str]) -> About:
    """What a manifest says of these. Raises UsageError."""
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        raise _refused("metrics must be a dict of names and numbers", metrics, '{"val_loss": 2.1}')
    if isinstance(tags, str) or not isinstance(tags, Sequence):
        raise _refused("tags must be a list of texts", tags, '["before-lr-drop"]')
    _check_names("metrics", metrics)
    _check_names("tags", tags)
    numbers_by_name = {name: _number(name, value) for name, value in metrics.items()}
    return About(metrics=numbers_by_name, tags=tuple(dict.fromkeys(tags)))


def _check_names(what: str, names: Iterable[object]) -> None:
    found = list(names)
    if len(found) > NAMES_MAX:
        facts = {"expected": f"at most {NAMES_MAX}", "got": len(found)}
        raise UsageError(f"a step has too many {what}", facts=facts)
    for name in found:
        if not is_name(name):
            facts = {"expected": f"{NAMED}", "got": shown(name)}
            raise UsageError(f"{what} need names", facts=facts)


def _number(name: str, value: Any) -> float:
    """The number. Tensors are refused, because reading one may wait for its device."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            facts = {"metric": name, "expected": "at most 1.8e308", "got": shown(value)}
            raise UsageError("a metric is too large for a float", facts=facts) from None
    facts = {"metric": name, "expected": "an int or a float", "got": shown(value)}
    hint = "pass value.item(), which waits for the device" if hasattr(value, "item") else None
    raise UsageError("a metric is not a number", facts=facts, hint=hint)


def _refused(summary: str, got: object, example: str) -> UsageError:
    return UsageError(summary, facts={"expected": f"such as {example}", "got": shown(got)})
