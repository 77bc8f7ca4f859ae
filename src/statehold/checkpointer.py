"""Checkpointer: save while training, commit, restore. The public face of statehold.

The path of a save: capture and plan on the caller's thread (milliseconds, no bytes copied except
what may change before the next update), then the engine stages and writes, and the pipeline
commits. The path of a restore: find the newest committed step, match it with the live state before
a byte is touched, read and verify straight into the existing tensors, apply the plain values.

Not here: who copies what (state), where bytes go (plan), how they get there (the engine), when a
step counts (store), what happens in the background (pipeline).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from statehold import _core
from statehold.errors import (
    ClosedError,
    CorruptionError,
    RunBusyError,
    StateholdError,
    StateMismatchError,
    UsageError,
)
from statehold.gate import Gate
from statehold.lock import RunLock
from statehold.options import Options
from statehold.pipeline import Pipeline, Work, logger
from statehold.plan import STEP_MAX
from statehold.save import Save
from statehold.share import PlanCache
from statehold.state.capture import capture
from statehold.state.device import Devices
from statehold.state.restore import prepare
from statehold.store import Store
from statehold.transfer import start_read, start_write

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.manifest import Manifest


class Checkpointer:
    """Saves and restores the state of a training run in the directory `run`.

    A state is a mapping of names to modules, optimizers, anything with `state_dict` and
    `load_state_dict`, tensors, plain values, and dicts, lists and tuples of these. The other
    parameters are the fields of statehold.options.Options.

    Nothing is opened before the first use. Use it as a context manager, or call close(): both wait
    until every save is committed. One Checkpointer at a time may save into a run directory.
    Not thread-safe: call it from the thread that trains.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self._run = os.path.abspath(os.fspath(run))
        self._options = Options(**options)
        self._open: _Opened | None = None
        self._closed = False
        self._borrowed_fs: Fs | None = None  # for statehold.testing
        self._gate = Gate()
        self._plans = PlanCache()
        self._watched: list[Save] = []

    # -- saving ----------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> Save:
        """Begin to save `state` as `step`; returns in milliseconds with a handle.

        The state may be used at once, but must not be updated before the save is "staged":
        torch optimizers wait for that by themselves, other updates call gate() first.
        Buffers and whatever else may change between updates are copied before this returns.

        Blocks while two earlier saves are not committed. Raises the error of an earlier save that
        failed since the last call, StepOrderError for a step older than the newest committed one,
        UnsupportedValueError for a value that no step can hold.
        """
        started = time.perf_counter()
        self._raise_failures()
        _check_step(step)
        opened = self._opened_for_saving()
        opened.pipeline.wait_for_room()
        waited_s = time.perf_counter() - started
        self._raise_failures()
        opened.store.check_order(step, opened.pipeline.newest_step())

        captured = capture(state)
        plan = self._plans.get([tensor.spec for tensor in captured.tensors], step).save
        save = Save(step, started)
        save._record(
            state_bytes=sum(spec.nbytes for spec in plan.specs),
            tensors=len(plan.specs),
            waited_s=waited_s,
        )
        job = start_write(opened.engine, plan, captured.tensors)
        copies = opened.devices.copies(job, captured, plan.source_index)
        self._gate.hold_for(save, copies.passing if copies else None)
        self._watched.append(save)
        work = Work(save, plan, job, captured.tree, captured, copies.run if copies else None)
        opened.pipeline.submit(work)
        opened.pipeline.wait_eager(work, captured)
        save._record(blocked_s=time.perf_counter() - started)
        return save

    def gate(self, timeout: float | None = None) -> None:
        """Wait until every save under way is staged: after this the state may be updated.

        Where all that is left to copy is device memory, the current stream waits, not the host:
        updates then have to be given to that stream.
        Only needed where the update is not the step() of a torch optimizer, such as a hand-written
        one. Raises WaitTimeout after `timeout` seconds.
        """
        self._gate.wait(timeout)

    # -- restoring -------------------------------------------------------------------------

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int | None:
        """Load a committed step into `state` in place; returns its number.

        Without `step`: the newest intact one, or None when the run has none. A corrupt step is
        passed over with a warning and set aside. Every byte is verified. Tensors keep their
        storage. Raises StateMismatchError before anything is changed when names, shapes or dtypes
        differ; CorruptionError when `step`, or every step, is damaged: the state may then be
        partly overwritten, so restore another step before training on.
        """
        self._raise_failures()
        opened = self._opened()
        self._gate.wait()
        if step is not None:
            _check_step(step)
            self._restore_step(opened, state, step)
            return step
        return self._restore_newest(opened, state)

    def _restore_newest(self, opened: _Opened, state: Mapping[str, Any]) -> int | None:
        failed: dict[int, CorruptionError] = {}
        while remaining := [step for step in opened.store.steps() if step not in failed]:
            step = remaining[-1]
            try:
                self._restore_step(opened, state, step)
            except CorruptionError as error:
                if step in opened.store.steps():  # else another process retired it meanwhile
                    failed[step] = error
                continue
            self._set_aside(opened, failed, step)
            return step
        if failed:
            raise failed[max(failed)].with_fact("also damaged", _listed(failed))
        return None

    def _restore_step(self, opened: _Opened, state: Mapping[str, Any], step: int) -> None:
        with opened.store.protect(step):
            try:
                manifest = opened.store.manifest(step)
                self._read_into(opened, state, manifest)
            except (CorruptionError, StateMismatchError) as error:
                error.with_fact("step", step)
                others = [other for other in opened.store.steps() if other != step]
                raise error.with_fact("other steps", _listed(others)) from None

    def _read_into(self, opened: _Opened, state: Mapping[str, Any], manifest: Manifest) -> None:
        restoration = prepare(state, manifest)
        directory = opened.store.path(manifest.step)
        reading = start_read(opened.engine, directory, manifest, restoration.destinations)
        try:
            opened.devices.load(reading.job, reading.external())
            reading.job.wait(None)
        except _core.Mismatch as mismatch:
            raise reading.mismatch(mismatch) from None
        finally:
            reading.job.cancel()
        restoration.finish()

    def _set_aside(
        self, opened: _Opened, failed: Mapping[int, CorruptionError], restored: int
    ) -> None:
        for step, error in failed.items():
            try:
                kept = self._opened_for_saving().store.quarantine(step)
            except RunBusyError:
                kept = opened.store.path(step)
            text = f"step {step} is damaged; step {restored} was restored instead. "
            warnings.warn(
                f"{text}The damaged step was kept as {kept}.\n{error}", RuntimeWarning, stacklevel=4
            )

    # -- the run ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return self._opened().store.steps()

    def rewind(self, step: int) -> list[int]:
        """Give up every committed step newer than `step`, to go on from there; returns them."""
        self._raise_failures()
        opened = self._opened_for_saving()
        opened.pipeline.drain()
        return opened.store.rewind(step)

    @property
    def backend(self) -> str:
        """How bytes move: "io_uring" or "threads"."""
        return self._opened().fs.backend

    def close(self) -> None:
        """Wait until every save has ended and give everything back. Safe to call twice.

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
        self._close()
        if kind is None:
            self._raise_failures()

    def __repr__(self) -> str:
        return f"<statehold.Checkpointer {self._run!r}>"

    def _close(self) -> None:
        self._closed = True
        self._gate.remove()
        if self._open is not None:
            self._open.close()
            self._open = None

    def _opened(self) -> _Opened:
        if self._closed:
            raise ClosedError("this Checkpointer was closed", facts={"run": self._run})
        if self._open is None:
            self._open = _Opened(self._run, self._options, self._borrowed_fs)
        return self._open

    def _opened_for_saving(self) -> _Opened:
        opened = self._opened()
        opened.prepare_saving()
        return opened

    def _raise_failures(self) -> None:
        for save in self._watched:
            error = save._unraised_error()
            if error is not None:
                raise error
        self._watched = [save for save in self._watched if not save.done() and not save.error]


class _Opened:
    """What an open Checkpointer holds: the file system, the engine, the store, the pipeline."""

    def __init__(self, run: str, options: Options, borrowed_fs: Fs | None) -> None:
        self._run = run
        self._lock: RunLock | None = None
        self._owns_fs = borrowed_fs is None
        self.fs = borrowed_fs or _core.open_fs(options.backend, options.queue_depth)
        _say_once(self.fs.note)
        self.store = Store(self.fs, run, keep=options.keep, reuse=options.reuse_files)
        self.engine = _core.Engine(
            self.fs, options.staging_size, options.buffer_size, options.copy_thread_count
        )
        self.devices = Devices(self.engine.staging_address, self.engine.staging.nbytes)
        self.pipeline = Pipeline(self.store)

    def prepare_saving(self) -> None:
        """Create the run directory, lock it, and clear what a crash left; once."""
        if self._lock is None:
            self.store.create()
            self._lock = RunLock(self._run, in_memory=self.fs.backend == "sim")
            self.store.recover()

    def close(self) -> None:
        self.pipeline.close()
        self.devices.close()
        self.engine.close()
        if self._lock is not None:
            try:
                self.store.drop_spare()
            except StateholdError as error:
                logger.warning("could not remove a retired step\n%s", error)
            self._lock.release()
        if self._owns_fs:
            self.fs.close()


_said: set[str] = set()


def _say_once(note: str) -> None:
    """Log why bytes move more slowly than they could; once a process."""
    if note and note not in _said:
        _said.add(note)
        logger.warning("saving with threads instead of io_uring: %s", note)


def _check_step(step: object) -> None:
    if type(step) is not int or not 0 <= step <= STEP_MAX:
        raise UsageError(
            "a step is a whole number", facts={"expected": f"0 to {STEP_MAX}", "got": repr(step)}
        )


def _listed(steps: Any) -> str:
    shown = sorted(steps)
    return ", ".join(map(str, shown[-8:])) + (f" ({len(shown)} in all)" if shown else "none")
