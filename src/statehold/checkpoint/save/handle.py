"""Save: the handle of one save, with its events and figures.

The three events come in this order: "staged" (the state may change), "written" (the bytes are
durable on this rank), "committed" (durable on all ranks, and published). A save that fails reaches
no further event, and every wait for an event raises its error. The handle of a step that was not
due reaches no event.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from statehold.checkpoint.telemetry.save_stats import EVENTS, Event, SaveStats
from statehold.checkpoint.telemetry.watch import UNWATCHED, Stage, Watch
from statehold.errors import ClosedError, PeerFailedError, StateholdError, UsageError, WaitTimeout
from statehold.process.reentry import refuse
from statehold.units import check_timeout


class Save:
    """The handle that Checkpointer.save() returns. Thread-safe."""

    def __init__(self, step: int, started: float, *, is_skipped: bool = False) -> None:
        self._started = started
        self._is_skipped = is_skipped
        self._watch = UNWATCHED
        self._is_reported = False
        self._moving_from = started
        self._guard = threading.RLock()
        self._latches: list[threading.Lock] = []  # each is released once, at the next event
        self._pid = os.getpid()
        self._stats = SaveStats(step)
        self._error: StateholdError | None = None
        self._raised = False

    @property
    def step(self) -> int:
        """The step that is being saved."""
        return self._stats.step

    @property
    def is_skipped(self) -> bool:
        """Whether the step was not due, so that nothing was saved."""
        return self._is_skipped

    @property
    def stats(self) -> SaveStats:
        """A snapshot of the figures so far."""
        return self._stats

    @property
    def error(self) -> StateholdError | None:
        """Why the save failed, or None."""
        return self._error

    def done(self, event: Event = "committed") -> bool:
        """Whether the event has happened. False if the save failed before it, or was skipped."""
        return self._reached(_checked(event)) is not None

    def wait(self, event: Event = "committed", timeout: float | None = None) -> Save:
        """Block until the event. Returns the handle.

        Args:
            event: "staged", "written" or "committed".
            timeout: in seconds; None waits as long as it takes.

        Raises:
            StateholdError: the save failed before the event.
            WaitTimeout: the deadline has passed; the save continues.
            UsageError: the step was skipped, or there is no such event.
        """
        refuse("wait()")
        return self._wait(event, timeout)

    def __repr__(self) -> str:
        state = f"failed: {self._error.summary}" if self._error else str(self._stats)
        if self._is_skipped:
            state = f"step {self.step}: not due"
        return f"<statehold.Save {state}>"

    # -- for the checkpointer --------------------------------------------------------------

    def _wait(self, event: Event, timeout: float | None = None) -> Save:
        """wait(), also inside a call of the Checkpointer."""
        if self._is_skipped:
            raise UsageError(
                f"step {self.step} was not due, so nothing was saved",
                hint="check is_skipped before waiting; save(step, state, force=True) always saves",
            )
        timeout = check_timeout(timeout)
        attained = self._wait_ended(_checked(event), timeout)
        if self.done(event):
            return self
        if attained and self._error is not None:
            self._raised = True
            raise self._error
        raise WaitTimeout(
            f"step {self.step} was not {event} in time",
            facts={"waited": f"{timeout} s", "so far": str(self._stats)},
            hint="the save continues in the background; committed steps are untouched",
        )

    def _reached(self, event: Event) -> float | None:
        seconds: float | None = getattr(self._stats, f"{event}_s")
        return seconds

    def _wait_ended(self, event: Event, timeout: float | None = None) -> bool:
        """Wait for the event or a failure. False if neither came in time."""
        until = None if timeout is None else time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        while not self._has_ended(event):
            if not self._is_of_this_process:
                raise forked("this save", self._pid)
            if not self._wait_for_one(event, until):
                return self._has_ended(event)
        return True

    def _wait_for_one(self, event: Event, until: float | None) -> bool:
        """Wait for any event. Holds no lock, so a signal handler may save meanwhile."""
        latch = threading.Lock()
        latch.acquire()
        self._latches.append(latch)
        if self._has_ended(event):  # since it was last looked at
            return True
        left = -1.0 if until is None else max(0.0, until - time.monotonic())
        if latch.acquire(timeout=left):
            return True
        with contextlib.suppress(ValueError):  # it is being released just now
            self._latches.remove(latch)
        return False

    def _has_ended(self, event: Event) -> bool:
        return self._reached(event) is not None or self._error is not None

    def _wake(self) -> None:
        while self._latches:
            with contextlib.suppress(IndexError):  # the last one has stopped waiting
                self._latches.pop().release()

    def _watched_by(self, watch: Watch) -> None:
        self._watch = watch

    def _stage(self, name: str) -> Stage:
        """A stage of this save, for the trace."""
        return self._watch.stage(name, step=self.step)

    @property
    def _is_of_this_process(self) -> bool:
        return os.getpid() == self._pid

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _record(self, **figures: object) -> None:
        with self._guard:
            self._stats = replace(self._stats, **figures)  # type: ignore[arg-type]

    def _moving(self) -> None:
        """The engine begins now."""
        self._moving_from = time.perf_counter()

    def _moved(self, engine: Mapping[str, int]) -> None:
        """The engine has written everything; its own figures count from its beginning."""
        self._watch.save_moved(self.step, self._moving_from, engine)

    def _returned(self) -> None:
        """save() ends now."""
        self._record(blocked_s=self._elapsed())
        self._watch.save_returned(self._started, self._stats)
        self._report_once()

    def _report_once(self) -> None:
        """Report a committed save once all its figures are known.

        A small save commits before save() returns.
        """
        with self._guard:
            is_known = self._stats.committed_s is not None and self._stats.blocked_s > 0
            is_due, self._is_reported = (
                is_known and not self._is_reported,
                self._is_reported or is_known,
            )
        if is_due:
            self._watch.save_committed(self._started, self._stats)

    def _add_gate(self, seconds: float) -> None:
        with self._guard:
            self._stats = replace(self._stats, gate_s=self._stats.gate_s + seconds)
        self._watch.gate_waited(seconds)

    def _reach(self, event: Event) -> None:
        with self._guard:
            reached = {f"{event}_s": self._elapsed()}
            self._stats = replace(self._stats, **reached)  # type: ignore[arg-type]
        self._wake()
        self._report_once()

    def _fail(self, error: StateholdError) -> None:
        with self._guard:
            self._error = error
        self._wake()
        self._watch.save_failed(self._started, self._stats)

    def _unraised_error(self) -> StateholdError | None:
        """The error, if nothing has raised it yet. The caller raises it.

        An error that only follows from another rank's report is not raised. Otherwise that rank
        would have to skip the next save, and the ranks would fail each other's saves for ever.
        """
        with self._guard:
            if self._error is None or self._raised:
                return None
            if isinstance(self._error, PeerFailedError) and self._error.follows:
                return None
            self._raised = True
            return self._error


def forked(what: str, owner_pid: int) -> ClosedError:
    """The error if a fork uses what its parent has begun, which would never end in the fork."""
    return ClosedError(
        f"{what} belongs to the process that was forked",
        facts={"begun by": f"process {owner_pid}", "used by": f"process {os.getpid()}"},
        hint="open another Checkpointer in this process; the parent's Checkpointer continues",
    )


def _checked(event: Event) -> Event:
    if event not in EVENTS:
        raise UsageError("no such event", facts={"expected": ", ".join(EVENTS), "got": repr(event)})
    return event
