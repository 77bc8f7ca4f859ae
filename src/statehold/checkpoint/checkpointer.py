"""Checkpointer: save while training, commit, restore. The public face of statehold.

A Checkpointer opens a session at its first use. save() and restore() are calls of that session.
save/call captures and plans on the caller's thread, in milliseconds. Then the engine stages and
writes, and the pipeline commits. restore/call is the way back.

On several ranks each has a Checkpointer of the same run directory, and all call save() and
restore() alike. Only restore(), rewind() and back-pressure wait for another rank.

Not here: the work of a session (session), how it is opened (opening), what ends it when nobody has
closed it (keeper).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from statehold.checkpoint.keeper import Keeper, wait_for_dropped
from statehold.checkpoint.levels.promoting import LevelStatus
from statehold.checkpoint.levels.specs import Level, levels_of
from statehold.checkpoint.opening import Borrowed, Opening, open_session
from statehold.checkpoint.restore.call import requested
from statehold.checkpoint.restore.choice import Choice
from statehold.checkpoint.save.call import labels
from statehold.checkpoint.save.gate import Trainer
from statehold.checkpoint.save.handle import Save
from statehold.checkpoint.session import Session
from statehold.errors import ClosedError, UsageError
from statehold.format.selection import RestoreReport, Selection
from statehold.layout.plan import step_of
from statehold.options import Coordination, Options
from statehold.options.io import Io
from statehold.options.keep import Keep, Mode, kept_of
from statehold.options.keywords import answering
from statehold.options.paths import check_run
from statehold.process.ending import JOIN, PROGRAM_ENDS, forget, remember
from statehold.process.reentry import enter
from statehold.ranks.preemption import Preemption
from statehold.tensors.devices.graphs import refuse_in_capture
from statehold.units import check_timeout


@answering(io=Io, keep=Keep)
class Checkpointer:
    """Saves and restores the state of a training run in the directory `run`.

    A state is a mapping of names to modules, optimizers, anything with `state_dict` and
    `load_state_dict`, tensors, plain values, and dicts, lists and tuples of these.

    The first use opens it. Use it as a context manager, or call close(): both wait until every save
    is committed. Without that, statehold finishes the saves in the background once
    the Checkpointer is dropped, or when the program ends. A later Checkpointer of the run waits for
    them. One Checkpointer at a time may save into a run directory.
    Not thread-safe: call it from the thread that trains. A signal handler that interrupts a call
    must not call it again, and gets a UsageError: see leave_on(). If it was used before a fork
    (such as a data-loading worker), it raises ClosedError in the fork. The fork may open its own.

    Args:
        run: the run directory. It need not exist yet.
        keep: which committed steps stay: so many of the newest, or what a Keep says. None: all
            stay, and a warning comes in time if the storage has no room for a few more.
        parent: a step of another run, such as "runs/base@1000" or "runs/base@best:val_loss". If
            this run has no step yet, restore() begins it with that one, by second names for its
            files. Each later step says so.
        levels: where steps are kept, the nearest level first; None: only in the run directory.
            Saves go to the first level, and background threads copy them to the others. A restore
            takes the nearest intact copy.
        staging_bytes: the most host memory that copies in flight use. If it is at least the size of
            the state, the update of the optimizer waits only for a memory copy. If it is smaller,
            the update also waits for the writes of the rest. None: 1 GiB, or one and a quarter of
            what this rank writes if that is more. All ranks of a host together use at most a third
            of the memory that is available. A log line says what was chosen.
        coordination: how the ranks of a job find each other. "store" uses the store of
            torch.distributed. "directory" uses files in the run directory, with the rank and the
            number of ranks that torchrun, srun or mpirun has put into the environment. With "none"
            this process saves alone, even if others run beside it. "auto" uses the store if
            torch.distributed is initialized with more than one rank.
        peer_timeout_s: how many seconds to wait for another rank before it counts as lost, also
            for one that still copies its part to another level. At the end also for a device that
            does nothing: it may wait for another rank, too.
        node_mtbf: for levels with every="auto", the mean time between failures of one node, such
            as "250d". None: a published figure (264 days).
        nodes: for levels with every="auto", the number of nodes of the job. None: the number of
            hosts of its ranks.
        trace: a file for a Chrome/Perfetto JSON trace, written at close(). Each of several ranks
            writes its own file, with its rank in the name. None records nothing.
        on_commit: a function, or a list of functions, to call with the Save when this rank knows
            that its step is committed. They run on a thread of their own, one after the other: no
            save waits for them, or fails because of them. What they raise is logged. They must not
            call the Checkpointer. Each rank calls its own.
        io: how bytes move, for experts. None: Io(), which takes what `statehold bench io` has
            measured.

    Raises:
        UsageError: an option is not valid; the error names it.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        keep: int | Keep | None = None,
        parent: str | os.PathLike[str] | None = None,
        levels: Sequence[Level] | None = None,
        staging_bytes: int | str | None = None,
        coordination: Coordination = "auto",
        peer_timeout_s: float = 600.0,
        node_mtbf: str | None = None,
        nodes: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        on_commit: Callable[[Save], object] | Sequence[Callable[[Save], object]] | None = None,
        io: Io | None = None,
    ) -> None:
        self._run = check_run(run)
        self._options = Options(
            keep=keep,
            parent=parent,
            staging_bytes=staging_bytes,
            coordination=coordination,
            peer_timeout_s=peer_timeout_s,
            node_mtbf=node_mtbf,
            nodes=nodes,
            trace=trace,
            on_commit=on_commit,
            io=Io() if io is None else io,
        )
        self._levels = levels_of(levels, self._options)
        self._open: Session | None = None
        self._keeper: Keeper[Session] | None = None  # as soon as it is open
        self._closed = self._has_ended = False  # by close(); with the program
        self._borrowed = Borrowed()  # for tests
        self._trainer = Trainer()
        self._gate = self._trainer.gate
        self._preemption: Preemption | None = None
        self.restored: RestoreReport | None = None

    # -- saving ----------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        force: bool = False,
    ) -> Save:
        """Begin to save `state` as `step`; returns in milliseconds with a handle.

        If the `every` of the first level says that the step is not due, this returns at once with a
        handle that `is_skipped`. A step with is_last() is always saved.

        The state may be used at once, but must not be updated before the save is "staged". torch
        optimizers wait for that by themselves; call gate() before other updates. Buffers, and
        everything else that may change between updates, are copied before this returns.
        All of several ranks call this, equally often and with the same steps and `force`.

        Blocks while two earlier saves are not committed. If is_last(step), waits until the step is
        committed, and raises SystemExit (see leave_on).

        Args:
            step: its number, from 0. It may be that of the newest step, which it then replaces.
            state: names and what belongs to them.
            metrics: numbers that the step says of itself, such as {"val_loss": 2.1}.
                Keep(best=...) and restore(best=...) go by them. Of several ranks those of rank 0
                count. To save a step first and measure it later, save it again.
            tags: words that the step says of itself, such as ["before-lr-drop"].
            force: save the step also if it is not due.

        Raises:
            StateholdError: an earlier save has failed since the last call.
            StepOrderError: the step is older than the newest committed one.
            UnsupportedValueError: no step can hold a value; the error names it.
        """
        enter("save()")
        refuse_in_capture("save()")
        number = self._trainer.calls
        self._trainer.calls += 1
        session, said = self._opened(), partial(labels, metrics, tags)
        handle, work = session.parts.save(
            number, step, state, said, force=force, is_last=self.is_last
        )
        if work is not None and work.is_last and self._preemption is not None:
            session.leave(work, self._preemption)
        return handle

    def gate(self, timeout: float | None = None) -> None:
        """Wait until every save under way is staged: after this the state may be updated.

        Call it before an update that is not the step() of a torch optimizer. If only device memory
        is left to copy, the current stream waits and the host does not: updates must then run on
        that stream. While a CUDA graph is captured, this marks the graph: its replays wait, too.
        Raises WaitTimeout after `timeout` seconds.
        """
        enter("gate()")
        self._gate.wait_or_note(check_timeout(timeout))

    # -- preemption ------------------------------------------------------------------------

    def leave_on(self, *signals: signal.Signals, within_s: float) -> None:
        """Let signals end this process in time.

        After a signal the next save() is the last. It waits until the step is committed and, while
        there is time, until all levels have it. Then it raises SystemExit(75). If you do not save
        at every step, call is_last() at each step. This replaces the signals' handlers until
        close(). Call it in the main thread, on each of several ranks. A signal to one rank is
        enough.

        Args:
            signals: by default SIGTERM and SIGUSR1.
            within_s: so many seconds after the signal the process ends, whatever it does. Its exit
                code is 75 if the last save is known to be committed, and 76 otherwise; older steps
                are safe.
        """
        enter("leave_on()")
        preemption = Preemption(within_s, self._opened().peers)
        preemption.install(*(signals or (signal.SIGTERM, signal.SIGUSR1)))
        self._preemption = preemption
        if self._keeper is not None:
            self._keeper.preemption = preemption

    def leave(self, within_s: float | None = None) -> None:
        """Act as if a signal of leave_on() had come, for warnings that come in other ways.

        Returns at once. Call it from any thread, on any one rank. within_s: None takes the time of
        leave_on(). The deadline is never later than that of an earlier warning.
        """
        if self._preemption is None:
            raise UsageError("leave() needs leave_on()", hint="call leave_on(within_s=...) first")
        self._preemption.ask(within_s)

    def is_last(self, step: int) -> bool:
        """Whether this is the step to save and leave with. Call it at the same steps on all ranks.

        False until some rank is warned. Then it becomes true on all ranks at the same step, and
        their next save() must be of that step. Waits for the other ranks once, after the warning.
        """
        step = step_of(step)
        return self._preemption is not None and self._preemption.is_last(step)

    @property
    def is_leaving(self) -> bool:
        """Whether some rank was warned to leave. Ranks see this at different steps: to decide what
        to save, call is_last()."""
        return self._preemption is not None and self._preemption.is_asked

    # -- restoring -------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        best: str | None = None,
        mode: Mode | None = None,
        tag: str | None = None,
        source: str | os.PathLike[str] | None = None,
        prefix: bool = False,
        only: Iterable[str] | None = None,
        skip: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> int | None:
        """Load a committed step into `state` in place; returns its number.

        Does not wait for a save that is under way: Save.wait("committed") does. Without `step`,
        loads the newest intact step, or returns None if the run has no step. Issues a
        RuntimeWarning for a damaged step and sets it aside. Verifies every byte that it reads.
        Tensors keep their storage. Any number of ranks may have saved the step, in any layout. All
        of several ranks call this.

        If names, shapes or dtypes differ, this raises an error before anything changes. If it fails
        later, as for damaged bytes, a storage that fails, or another rank, the state may be partly
        overwritten, and the error has the fact "the state". Then restore a step before you continue
        to train.

        Args:
            state: what to fill, as for save().
            step: its number. None: the newest one.
            best: load the step with the best value of this metric, such as "val_loss". A damaged
                step is skipped like the newest one, and then the next best is loaded.
            mode: "min" or "max", for `best`. None: the mode of a Keep that names the metric, else
                "min".
            tag: load the newest step with this tag. A damaged one is skipped, too.
            source: another run or a step of it, such as "runs/base@1000" or "runs/base@tag:good",
                to read instead of this run. It is only read. If this run has no step yet, its steps
                will say that it began from there.
            prefix: load only the layers of the model that it shares with that of the step, from the
                first one on (lineage.Graph), and nothing else; `restored` lists what was kept.
            only: names or patterns of what to restore ("model", "*.bias"). None: all.
            skip: names or patterns of what not to restore.
            rename: saved prefixes and the live prefixes that replace them.
            strict: False accepts missing or unexpected entries; `restored` then lists them.
            cast: True converts between floating-point dtypes where the live tensor has another
                one than the step; `restored` then lists these.

        Raises:
            StateMismatchError: names, shapes or dtypes differ, or nothing would be loaded.
            UsageError: a pattern matches nothing on any rank.
            StepNotFoundError: no step has the metric or the tag, or the source has no such step.
            CorruptionError: `step` is damaged, or every step is.
            PeerLostError, PeerFailedError: another rank is the cause.
        """
        enter("restore()")
        refuse_in_capture("restore()")
        choice = Choice(step, best, tag, mode or (best and self._mode_of(best)))
        request = requested(choice, source, prefix, Selection(only, skip, rename, strict, cast))
        restores = self._begun_anew().restores
        try:
            return restores.restore(state, request)
        finally:
            self.restored = restores.report

    def _mode_of(self, metric: str) -> Mode | None:
        """The mode of a Keep that names this metric."""
        keeps = (kept_of(level.keep) for level in self._levels)
        return next((keep.mode for keep in keeps if keep and keep.metric == metric), None)

    # -- the run ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are committed at any level, oldest first. If each host has its own level,
        all ranks call this."""
        enter("steps()")
        return self._opened().steps()

    def rewind(self, step: int) -> list[int]:
        """Discard every step newer than `step`, at every level; returns the discarded steps.

        Args:
            step: a committed step.

        Raises:
            StepNotFoundError: the run has no such step, or files of it are missing. Nothing was
                discarded. rewind() reads no data: restore(step=step) before it does.
            StorageError: a level cannot be reached. `facts["failed"]` says whether steps may be
                discarded; the next rewind() completes it.
        """
        enter("rewind()")
        step = step_of(step)
        return self._begun_anew().rewind(step)

    def levels(self) -> list[LevelStatus]:
        """The status of each level, the first one first: its newest step, the copy under way, the
        last failure, and its interval if "auto" has chosen it.

        Ask rank 0. Of the levels behind the first, the other ranks know only the copies that they
        made since the last restore or flush.
        """
        enter("levels()")
        return self._opened().status()

    def flush(self, timeout: float | None = None) -> None:
        """Copy the newest committed step to every level; all ranks call this.

        Waits for the saves and copies under way, and then copies the step to every level without
        it, whatever the cadence. If a level fails, logs a warning, and levels() has the error.
        Raises WaitTimeout after `timeout` seconds, or PeerLostError if a rank has not called this
        by then; the copies continue.
        """
        enter("flush()")
        session = self._opened()
        session.prepare_saving()
        session.flush(check_timeout(timeout))

    @property
    def backend(self) -> str:
        """How bytes move: "io_uring" or "threads"."""
        enter("backend")
        return self._opened().runtime.fs.backend

    def write_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the trace recorded so far to `path`, or to the file of the option `trace`.

        Returns the file's name. Raises UsageError if nothing is recorded.
        """
        enter("write_trace()")
        return self._opened().watch.write_trace(path)

    def close(self) -> None:
        """Wait until every save has ended, copy the newest step to all levels if any was saved,
        and release everything. Safe to call twice.

        A save is given up with a DeviceError if its device does nothing for `peer_timeout_s`.
        Raises the error of a save that failed since the last call.
        """
        enter("close()")
        self._close()
        self._trainer.raise_failures()

    def __enter__(self) -> Checkpointer:
        enter("the beginning of a with block")
        self._opened()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        enter("the end of a with block")
        self._close(error)
        if kind is None:
            self._trainer.raise_failures()
        elif self._preemption is not None:
            self._preemption.failed(error)

    def __repr__(self) -> str:
        return f"<statehold.Checkpointer {self._run!r}>"

    def _end(self) -> None:
        """The program ends, by an exception or not, and nobody has closed this."""
        self._has_ended = True
        self._close(getattr(sys, "last_value", None), alike=False)

    def _close(
        self, error: BaseException | None = None, *, flush: bool = True, alike: bool = True
    ) -> None:
        """error: what has brought this rank here, and perhaps no other. alike: all ranks call
        this."""
        self._closed = True
        forget(self)
        preemption, keeper, self._open = self._preemption, self._keeper, None
        if keeper is None or not keeper.is_ours:
            self._gate.remove()
            return  # a fork has nothing to wait for, and nothing to release
        number = self._trainer.calls

        def end(session: Session) -> None:
            if error is not None:
                session.part(number, error)
            wanted = flush and not (preemption is not None and preemption.has_ended)
            session.close(flush=wanted, alike=alike and error is None)

        try:
            if preemption is not None:
                preemption.part()
            keeper.close(end)
        finally:
            # otherwise, after Ctrl-C, updates still wait until everything is staged
            if keeper.has_ended:
                self._gate.remove()
            if preemption is not None:
                preemption.remove()

    def _opened(self) -> Session:
        is_taken_over = self._keeper is not None and self._keeper.is_dropped
        if self._has_ended:
            raise ClosedError(PROGRAM_ENDS, facts={"run": self._run}, hint=JOIN)
        if self._closed or is_taken_over:
            what = "this Checkpointer was closed"
            if is_taken_over:
                what = "another Checkpointer of this process took the run over from this one"
            raise ClosedError(what, facts={"run": self._run})
        if self._open is None:
            self._gate.stand()  # first: Ctrl-C never leaves a session without it
            self._open = self._open_now()
            remember(self)
        self._open.check_process()
        return self._open

    def _open_now(self) -> Session:
        """Open everything, and have the keeper keep it until it has ended."""
        wait_for_dropped(self._run)
        owned = contextlib.ExitStack()
        try:
            opening = Opening(self._run, self._levels, self._options, self._borrowed, self._trainer)
            session = open_session(opening, owned)
            self._keeper = Keeper(self._run, session, self._gate, weakref.ref(self))
            self._keeper.preemption = self._preemption  # of an earlier session
            weakref.finalize(self, self._keeper.drop).atexit = False
        except BaseException:
            self._keeper = None
            self._gate.remove()
            owned.close()
            raise
        return session

    def _begun_anew(self) -> Session:
        """Smaller steps than before may follow, on all ranks."""
        if self._preemption is not None:
            self._preemption.begin_again()
        return self._opened()


# -- for the layers above --------------------------------------------------------------------------


def leave_to_others(ckpt: Checkpointer, step: int) -> None:
    """End this process if it was asked to leave: others have the state of `step`, and save."""
    if ckpt._preemption is not None and ckpt.is_last(step):
        ckpt._preemption.end(
            lambda _: None, ckpt._opened().wait_idle, lambda: f"other replicas have step {step}"
        )


def go_on_from(ckpt: Checkpointer, step: int) -> list[int]:
    """rewind() for an integration that may have loaded the step from a folder of its own."""
    return ckpt._begun_anew().rewind(step, is_elsewhere=True)


def give_way(ckpt: Checkpointer) -> None:
    """Let another process save into the run. Waits as close() does; the next use opens the run
    again. Only for a process that saves alone."""
    keeper, ckpt._open = ckpt._keeper, None
    if keeper is None or keeper.has_ended or not keeper.is_ours:
        return
    forget(ckpt)
    try:
        keeper.close(lambda session: session.close(flush=True))
    finally:
        if keeper.has_ended:  # see _close
            ckpt._gate.remove()


def borrowed_by(ckpt: Checkpointer) -> Borrowed:
    """What a test gives to a Checkpointer that is not open yet."""
    return ckpt._borrowed
