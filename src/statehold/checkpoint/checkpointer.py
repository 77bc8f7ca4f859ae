"""Checkpointer: save while training, commit, restore. The public face of statehold.

The path of a save: capture and plan on the caller's thread (milliseconds, no bytes copied except
what may change before the next update), then the engine stages and writes, and the pipeline
commits. The path of a restore is in `restoring`.

On several ranks each has a Checkpointer of the same run directory, and all call save() and
restore() alike; nothing here waits for another rank but restore(), rewind() and back-pressure.

Not here: who copies what (state), who writes what (share), where bytes go (plan), how they get
there (the engine), when a step counts (store, team), what happens in the background (pipeline).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from statehold import _core
from statehold.checkpoint.keeper import Keeper, wait_for_dropped
from statehold.checkpoint.levels.alike import check_same, described
from statehold.checkpoint.levels.promoting import LevelStatus
from statehold.checkpoint.levels.specs import Level, levels_of
from statehold.checkpoint.quarantine import set_aside
from statehold.checkpoint.restore.restoring import Restorer
from statehold.checkpoint.save.gate import Gate
from statehold.checkpoint.save.handle import Save
from statehold.checkpoint.save.work import Work
from statehold.checkpoint.save.writes import in_file_order, start_write
from statehold.checkpoint.session import Session
from statehold.errors import (
    ClosedError,
    PeerFailedError,
    UsageError,
)
from statehold.format.selection import RestoreReport, Selection
from statehold.layout.plan import step_of
from statehold.observe.once import say_once
from statehold.options import check_run, options_of
from statehold.process.ending import forget, remember
from statehold.process.garbage import uncollected
from statehold.ranks.agreeing import everyone, led, together
from statehold.ranks.preemption import Preemption
from statehold.tensors import fingerprints
from statehold.tensors.capture import capture
from statehold.tensors.captured import Capture, CapturedTensor
from statehold.tensors.devices.graphs import refuse_in_capture
from statehold.tensors.devices.relay import named_failures
from statehold.tensors.recognition import Seen
from statehold.tensors.restore import check_takes_values
from statehold.units import check_timeout

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.levels.hosts.meeting import Exchange
    from statehold.ranks.peers import Peers


class Checkpointer:
    """Saves and restores the state of a training run in the directory `run`.

    A state is a mapping of names to modules, optimizers, anything with `state_dict` and
    `load_state_dict`, tensors, plain values, and dicts, lists and tuples of these.

    levels: where steps are kept, from the nearest on; None: in the run directory alone. Saves go to
    the first and from there, in the background, to the others; a restore takes the nearest intact
    copy. The other parameters are the fields of statehold.options.Options.

    Nothing is opened before the first use. Use it as a context manager, or call close(): both wait
    until every save is committed. Without that its saves are finished in the background once it is
    dropped, or when the program ends; a later Checkpointer of the run waits for them. One
    Checkpointer at a time may save into a run directory.
    Not thread-safe: call it from the thread that trains. In a fork of its process (a data-loading
    worker) it raises ClosedError once it has been used before the fork; the fork may open its own.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        levels: Sequence[Level] | None = None,
        **options: Any,
    ) -> None:
        self._run = check_run(run)
        self._options = options_of(options)
        self._levels = levels_of(levels, self._options)
        self._open: Session | None = None
        self._keeper: Keeper[Session] | None = None  # as soon as it is open
        self._closed = False
        self._is_taken_over = False
        self._borrowed_fs: Fs | None = None  # for statehold.testing
        self._borrowed_peers: Peers | None = None  # for statehold.testing
        self._borrowed_exchange: Exchange | None = None  # for statehold.testing
        self._seen = Seen()
        self._gate = Gate()
        self._watched: list[Save] = []
        self._saves_called = 0
        self._preemption: Preemption | None = None
        self.restored: RestoreReport | None = None

    # -- saving ----------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], *, force: bool = False) -> Save:
        """Begin to save `state` as `step`; returns in milliseconds with a handle.

        Where the step is not due, by the `every` of the first level, this returns at once with a
        handle that `is_skipped`. force: save it in any case; so is a step of which is_last() is
        true.

        The state may be used at once, but must not be updated before the save is "staged":
        torch optimizers wait for that by themselves, other updates call gate() first.
        Buffers and whatever else may change between updates are copied before this returns.
        On several ranks all of them call this, equally often and with the same steps and `force`.

        Blocks while two earlier saves are not committed. Where is_last(step), waits until the step
        is committed, and raises SystemExit (see leave_on).
        Raises the error of an earlier save that failed since the last call, StepOrderError for a
        step older than the newest committed one, UnsupportedValueError for a value that no step
        can hold.
        """
        refuse_in_capture("save()")
        number, self._saves_called = self._saves_called, self._saves_called + 1
        opened = self._opened()
        try:
            step = step_of(step)
            is_due = self._is_due(opened, number, step, force)
            if is_due:
                work, captured = self._begin(number, step, state)
        except BaseException as error:
            opened.pipeline.give_up(number, self._told_of(error))
            raise
        if not is_due:
            self._raise_failures()
            return Save(step, 0.0, is_skipped=True)
        opened.pipeline.wait_eager(work, captured)
        self._gate.streams_follow()
        self._gate.wait_if_unseen(work.save)
        work.save._returned()
        opened.rhythm.saved(work.save.stats.blocked_s, self._gate.waited_s)
        if work.is_last and self._preemption is not None:
            told = partial(opened.told_of, step, work.place)
            self._preemption.end(partial(work.save.wait, "committed"), opened.wait_idle, told)
        return work.save

    def _is_due(self, opened: Session, number: int, step: int, force: bool) -> bool:
        return opened.rhythm.is_due(
            number,
            step,
            wanted=force or self.is_last(step),
            is_saving=opened.pipeline.is_saving,
            gate_s=self._gate.waited_s,
        )

    def _begin(self, number: int, step: int, state: Mapping[str, Any]) -> tuple[Work, Capture]:
        """Everything up to handing the save over: what fails here has not begun."""
        save = Save(step, time.perf_counter())
        opened = self._opened()  # before anything can fail: other ranks have to be told
        self._raise_failures()
        save._watched_by(opened.watch)
        opened.prepare_saving()
        with save._stage("wait"):
            opened.pipeline.wait_for_room(opened.rhythm.turns.settled)
        save._record(waited_s=save._elapsed())
        is_last = self.is_last(step)
        if is_last:
            opened.promotions.end_with(step)
        else:  # the last save does not stop for one before it
            self._raise_failures()
        opened.check_order(step)

        self._gate.join_streams()
        with save._stage("capture"), uncollected(), named_failures(memory=False):
            captured = capture(state, opened.rank, self._gate.passed(), self._seen)
        say_once(captured.note, logging.INFO)
        for doubt in captured.doubts:
            say_once(doubt)
        self._gate.check_gradients(step)
        with save._stage("plan"):
            specs = [tensor.spec for tensor in captured.tensors]
            known = opened.claims.resolve(specs, opened.rhythm.turns.settled)
            plan = opened.plans.get(known.specs, step)
        save._record(
            state_bytes=sum(tensor.spec.nbytes for tensor in captured.tensors),
            eager_bytes=captured.eager_bytes,
            written_bytes=plan.save.file_bytes,
            tensors=len(captured.tensors),
        )
        names = {name for each in known.comparisons for name in each.names}
        compared = [tensor for tensor in captured.tensors if tensor.spec.name in names]
        self._watched.append(save)
        work = Work(
            save=save,
            number=number,
            plan=plan,
            tree=captured.tree,
            capture=captured,
            place=opened.near[0],
            comparisons=known.comparisons,
            version=opened.claims.version,
            fingerprinting=fingerprints.begin(compared, _core.hash_memory),
            is_last=is_last,
        )
        self._start(opened, work, captured, compared)
        return work, captured

    def _start(
        self,
        opened: Session,
        work: Work,
        captured: Capture,
        compared: Sequence[CapturedTensor],
    ) -> None:
        """Begin to copy what was captured, and hand `work` over: wholly, or not at all.

        Whatever ends this in between (an error, Ctrl-C) stops the native job before anything that
        it copies from is let go. Then the handle fails, so that nothing waits for it.
        """
        opened.watch.save_began()
        try:
            with uncollected():
                ordered = in_file_order(work.plan, captured.tensors)
            opened.make_room(work.plan.save)
            work.save._moving()
            file = opened.ready_file(work.plan.save, work.tree)
            work.is_attached = file is not None
            work.save._record(reused=work.is_attached)
            with uncollected():
                work.job = start_write(opened.engine, work.plan.save, ordered, file)
                work.copies = opened.devices.copies(work.job, captured, ordered, compared)
            self._gate.hold_for(work.save, work.copies.passing if work.copies else None)
            opened.pipeline.submit(work)
        except BaseException as error:
            opened.pipeline.take_back(work, error)
            raise

    def gate(self, timeout: float | None = None) -> None:
        """Wait until every save under way is staged: after this the state may be updated.

        Where all that is left to copy is device memory, the current stream waits, not the host:
        updates then have to be given to that stream.
        Only needed where the update is not the step() of a torch optimizer, such as a hand-written
        one. While a CUDA graph is captured this marks the graph: its replays will wait, too.
        Raises WaitTimeout after `timeout` seconds.
        """
        self._gate.wait_or_note(check_timeout(timeout))

    # -- preemption ------------------------------------------------------------------------

    def leave_on(self, *signals: signal.Signals, within_s: float) -> None:
        """Let the signals, SIGTERM and SIGUSR1 if none is named, end this process in time.

        After one of them the next save() is the last: it waits until the step is committed, and for
        as long as there is time until all levels have it, and raises SystemExit(75). Save rarely?
        Ask is_last() at each step. `within_s` seconds after the signal the process has ended
        whatever it does, with exit code 75 if its last save is committed and 76 if that is not
        known; older steps are safe. Replaces the signals' handlers until close(). Call it in the
        main thread, and on each of several ranks: it is enough that one of them gets the signal.
        """
        preemption = Preemption(within_s, self._opened().peers)
        preemption.install(*(signals or (signal.SIGTERM, signal.SIGUSR1)))
        self._preemption = preemption
        if self._keeper is not None:
            self._keeper.preemption = preemption

    def leave(self, within_s: float | None = None) -> None:
        """Leave as if a signal of leave_on() had come, for warnings that come in other ways.

        Returns at once. From any thread, on any one rank. within_s: None is the time that
        leave_on() was given; never longer than an earlier warning leaves.
        """
        if self._preemption is None:
            raise UsageError("leave() needs leave_on()", hint="call leave_on(within_s=...) first")
        self._preemption.ask(within_s)

    def is_last(self, step: int) -> bool:
        """Whether this is the step to save and leave with. Ask at each step, on all ranks alike.

        False until a warning came to some rank, and then on all ranks from the same step on, which
        the next save() of each has to be of. Waits for the other ranks once, when one is warned.
        """
        step = step_of(step)
        return self._preemption is not None and self._preemption.is_last(step)

    @property
    def is_leaving(self) -> bool:
        """Whether some rank was asked to leave. Ranks learn it at different steps: to decide what
        to save, ask is_last()."""
        return self._preemption is not None and self._preemption.is_asked

    # -- restoring -------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        only: Iterable[str] | None = None,
        skip: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> int | None:
        """Load a committed step into `state` in place; returns its number.

        Without `step`: the newest intact one, or None when the run has none. A corrupt step is
        passed over with a warning and set aside. Every byte that is read is verified. Tensors keep
        their storage. The step may have been saved by any number of ranks in any layout; on
        several ranks all of them call this.

        only, skip: names or patterns of what to restore ("model", "*.bias"). rename: saved prefixes
        and the live ones they become. strict: False accepts what the step lacks or has too much;
        `restored` then says what happened.

        Raises before anything is changed: StateMismatchError when names, shapes or dtypes differ,
        or nothing would be loaded; UsageError for a pattern that matches nothing on any rank.
        CorruptionError when `step`, or every step, is damaged: the state may then be partly
        overwritten, so restore another step before training on. PeerLostError, PeerFailedError: the
        same, because of another rank.
        """
        refuse_in_capture("restore()")
        if step is not None:
            step = step_of(step)
        selection = Selection(only, skip, rename, strict)
        opened = self._begun_anew()
        levels = led(opened.peers, lambda: described(self._levels))
        together(opened.peers, lambda: self._ready_to_restore(levels, state))
        self._gate.wait()
        self._gate.join_streams()
        nearest = opened.nearest()
        with opened.watch.restore() as watch:
            restorer = Restorer(
                nearest,
                opened.engine,
                opened.devices,
                opened.peers,
                state,
                selection,
                watch,
                opened.claim,
            )
            self.restored, failed = restorer.newest() if step is None else restorer.only(step)
            watch.end(self.restored, failed)
        if self.restored is None:
            together(opened.peers, opened.check_there)
            return None
        opened.rhythm.turns.goes_on_from(self.restored.step)
        opened.restored(self.restored.step, nearest.served(self.restored.step))
        if failed:
            set_aside(opened, failed, restorer.confirmed, self.restored.step)
        return self.restored.step

    def _ready_to_restore(self, levels_of_rank_0: str, state: object) -> None:
        self._raise_failures()
        check_takes_values(state)
        check_same(self._levels, levels_of_rank_0)

    # -- the run ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are committed at any level, oldest first. All ranks call this, where a
        level is each host's own."""
        return self._opened().nearest().steps()

    def rewind(self, step: int) -> list[int]:
        """Give up every committed step newer than `step`, to go on from there; returns them."""
        step = step_of(step)
        opened = self._begun_anew()
        together(opened.peers, self._ready_to_rewind)
        found = everyone(opened.peers, lambda: opened.rewind(step))
        given_up = sorted({each for steps in found for each in steps})
        opened.forget(given_up)
        opened.rhythm.turns.goes_on_from(step)
        return given_up

    def _ready_to_rewind(self) -> None:
        self._raise_failures()
        opened = self._opened_for_saving()
        opened.pipeline.drain()
        opened.promotions.wait(None)

    def levels(self) -> list[LevelStatus]:
        """How the levels stand, the first one first: their newest step, what is copied, what
        failed, and how often they get a step where that is chosen ("auto")."""
        return self._opened().levels()

    def flush(self, timeout: float | None = None) -> None:
        """Bring the newest committed step to every level; all ranks call this.

        Waits for the saves and copies under way, and copies what a level lacks whatever its
        cadence. A level that fails is logged, and told by levels(). Raises WaitTimeout after
        `timeout` seconds, PeerLostError if a rank has not come to this by then; the copies go on.
        """
        self._opened_for_saving().flush(check_timeout(timeout))

    @property
    def backend(self) -> str:
        """How bytes move: "io_uring" or "threads"."""
        return self._opened().fs.backend

    def write_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write what the option `trace` has recorded so far; returns the file's name.

        To `path`, or where close() will write it. Raises UsageError where nothing is recorded.
        """
        return self._opened().watch.write_trace(path)

    def close(self) -> None:
        """Wait until every save has ended, bring the newest step to all levels, and give everything
        back. Safe to call twice.

        Raises the error of a save that failed since the last call.
        """
        self._close()
        self._raise_failures()

    def __enter__(self) -> Checkpointer:
        self._opened()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)
        if kind is None:
            self._raise_failures()
        elif self._preemption is not None:
            self._preemption.failed(error)

    def __repr__(self) -> str:
        return f"<statehold.Checkpointer {self._run!r}>"

    def _end(self) -> None:
        """The program ends, by an exception or not, and nobody has closed this."""
        self._close(getattr(sys, "last_value", None), alike=False)

    def _close(
        self, error: BaseException | None = None, *, flush: bool = True, alike: bool = True
    ) -> None:
        """error: what has brought this rank here, and perhaps no other. alike: all ranks come."""
        self._closed = True
        forget(self)
        preemption, keeper, self._open = self._preemption, self._keeper, None
        if keeper is None or not keeper.is_ours:
            self._gate.remove()
            return  # a fork has nothing to wait for, and nothing to give back
        number = self._saves_called

        def end(opened: Session) -> None:
            if error is not None:
                opened.part(number, error)
            wanted = flush and not (preemption is not None and preemption.has_ended)
            opened.close(flush=wanted, alike=alike and error is None)

        try:
            if preemption is not None:
                preemption.part()
            keeper.close(end)
        finally:
            if keeper.has_ended:  # else, after Ctrl-C, updates go on waiting for what is staged
                self._gate.remove()
            if preemption is not None:
                preemption.remove()

    def _taken_over(self) -> None:
        """Another Checkpointer has the run: only the traceback of an old error knew this one."""
        self._closed = self._is_taken_over = True
        self._open = None
        forget(self)

    def _opened(self) -> Session:
        if self._closed:
            what = "this Checkpointer was closed"
            if self._is_taken_over:
                what = "another Checkpointer of this process took the run over from this one"
            raise ClosedError(what, facts={"run": self._run})
        if self._open is None:
            self._open = self._open_now()
            remember(self)
            self._gate.stand()
        self._open.check_process()
        return self._open

    def _open_now(self) -> Session:
        """Open everything, and have it kept until it has ended."""
        wait_for_dropped(self._run)
        owned = contextlib.ExitStack()
        try:
            opened = Session(
                self._run,
                self._levels,
                self._options,
                self._borrowed_fs,
                self._borrowed_peers,
                self._borrowed_exchange,
                owned,
            )
            self._keeper = Keeper(self._run, opened, self._gate, weakref.ref(self))
            weakref.finalize(self, self._keeper.drop).atexit = False
        except BaseException:
            self._keeper = None
            owned.close()
            raise
        return opened

    def _begun_anew(self) -> Session:
        """Smaller steps than before may follow, on all ranks."""
        if self._preemption is not None:
            self._preemption.begin_anew()
        return self._opened()

    def _opened_for_saving(self) -> Session:
        opened = self._opened()
        opened.prepare_saving()
        return opened

    def _told_of(self, error: BaseException) -> BaseException:
        """What the other ranks are told of a save that did not begin."""
        if any(save.error is error for save in self._watched):
            return PeerFailedError(self._opened().rank or 0, str(error), follows=True)
        return error

    def _raise_failures(self) -> None:
        for save in self._watched:
            error = save._unraised_error()
            if error is not None:
                raise error
        self._watched = [save for save in self._watched if not save.done() and not save.error]
