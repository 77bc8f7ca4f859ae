"""Checkpointer: save while training, commit, restore. The public face of statehold.

A Checkpointer opens a session at its first use. save() and restore() are calls of that session:
save/call captures and plans on the caller's thread, in milliseconds, then the engine stages and
writes, and the pipeline commits. restore/call is the way back.

On several ranks each has a Checkpointer of the same run directory, and all call save() and
restore() alike; nothing here waits for another rank but restore(), rewind() and back-pressure.

Not here: what a session does (session), how it is opened (opening), what ends it when nobody has
closed it (keeper).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from statehold.checkpoint.keeper import Keeper, wait_for_dropped
from statehold.checkpoint.levels.promoting import LevelStatus
from statehold.checkpoint.levels.specs import Level, levels_of
from statehold.checkpoint.opening import Borrowed, Opening, open_session
from statehold.checkpoint.save.call import Calls
from statehold.checkpoint.save.handle import Save
from statehold.checkpoint.session import Session
from statehold.errors import (
    ClosedError,
    UsageError,
)
from statehold.format.selection import RestoreReport, Selection
from statehold.layout.plan import step_of
from statehold.options import check_run, options_of
from statehold.process.ending import forget, remember
from statehold.ranks.preemption import Preemption
from statehold.tensors.devices.graphs import refuse_in_capture
from statehold.units import check_timeout


class Checkpointer:
    """Saves and restores the state of a training run in the directory `run`.

    A state is a mapping of names to modules, optimizers, anything with `state_dict` and
    `load_state_dict`, tensors, plain values, and dicts, lists and tuples of these.

    levels: where steps are kept, from the nearest on; None: in the run directory alone. Saves go to
    the first and from there, in the background, to the others; a restore takes the nearest intact
    copy. The other parameters are the fields of statehold.options.Options.

    Nothing is opened before the first use. Use it as a context manager, or call close(): both wait
    until every save is committed. Without that, statehold finishes the saves in the background once
    the Checkpointer is dropped, or when the program ends. A later Checkpointer of the run waits for
    them. One Checkpointer at a time may save into a run directory.
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
        self._borrowed = Borrowed()  # for statehold.testing
        self._calls = Calls()
        self._gate = self._calls.gate
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
        number = self._calls.next()
        return self._opened().save(
            number,
            step,
            state,
            force=force,
            is_last=self.is_last,
            preemption=self._preemption,
        )

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
        session = self._begun_anew()
        try:
            return session.restore(state, step, selection)
        finally:
            self.restored = session.restored

    # -- the run ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are committed at any level, oldest first. All ranks call this, where a
        level is each host's own."""
        return self._opened().steps()

    def rewind(self, step: int) -> list[int]:
        """Give up every committed step newer than `step`, to go on from there; returns them."""
        step = step_of(step)
        return self._begun_anew().rewind(step)

    def levels(self) -> list[LevelStatus]:
        """How the levels stand, the first one first: their newest step, what is copied, what
        failed, and how often they get a step where that is chosen ("auto")."""
        return self._opened().status()

    def flush(self, timeout: float | None = None) -> None:
        """Bring the newest committed step to every level; all ranks call this.

        Waits for the saves and copies under way, and copies what a level lacks whatever its
        cadence. A level that fails is logged, and told by levels(). Raises WaitTimeout after
        `timeout` seconds, PeerLostError if a rank has not come to this by then; the copies go on.
        """
        session = self._opened()
        session.prepare_saving()
        session.flush(check_timeout(timeout))

    @property
    def backend(self) -> str:
        """How bytes move: "io_uring" or "threads"."""
        return self._opened().runtime.fs.backend

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
        self._calls.raise_failures()

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
            self._calls.raise_failures()
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
        number = self._calls.number

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
            opening = Opening(self._run, self._levels, self._options, self._borrowed, self._calls)
            session = open_session(opening, owned)
            self._keeper = Keeper(self._run, session, self._gate, weakref.ref(self))
            weakref.finalize(self, self._keeper.drop).atexit = False
        except BaseException:
            self._keeper = None
            owned.close()
            raise
        return session

    def _begun_anew(self) -> Session:
        """Smaller steps than before may follow, on all ranks."""
        if self._preemption is not None:
            self._preemption.begin_anew()
        return self._opened()
