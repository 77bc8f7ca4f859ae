"""One save, with its events and figures, for all who have to do with it.

    Save         what the trainer gets of it
    Passage      what those have who take it through its events
    Work         what the stage thread and the commit thread know of it
    Callbacks    the functions of on_commit

Invariants: the events come in this order: "staged" (the state may change), "written" (the bytes are
durable on this rank), "committed" (durable on all ranks, and published). A save that fails reaches
no further event, and every wait for an event raises its error. The handle of a step that was not
due reaches no event.

Not here: the threads that take a save (pipeline), its call (call).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.levels.promoting import NO_COPIES
from statehold.checkpoint.save.shared import Register, SharedFiles
from statehold.checkpoint.telemetry.watch import EVENTS, UNWATCHED, Event, SaveStats, Watch
from statehold.errors import ClosedError, PeerFailedError, StateholdError, UsageError, WaitTimeout
from statehold.format.entries import NOTHING, About
from statehold.layout.stored import StoredPart
from statehold.process.reentry import refuse
from statehold.process.worker import Thread
from statehold.units import check_timeout

if TYPE_CHECKING:
    from statehold._core import WriteJob
    from statehold.checkpoint.levels.promoting import Copies
    from statehold.errors import StateholdError
    from statehold.layout.claims import Comparison
    from statehold.layout.share import RankPlan
    from statehold.observe.background_log import BackgroundLog
    from statehold.steps.target import DirectoryPlace
    from statehold.tensors.captured import Capture
    from statehold.tensors.devices.copying import DeviceCopies
    from statehold.tensors.stored import StoredState


class Save:
    """The handle that Checkpointer.save() returns. Thread-safe."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage

    @property
    def step(self) -> int:
        """The step that is being saved."""
        return self._passage.step

    @property
    def is_skipped(self) -> bool:
        """Whether the step was not due, so that nothing was saved."""
        return self._passage.is_skipped

    @property
    def stats(self) -> SaveStats:
        """A snapshot of the figures so far."""
        return self._passage.stats

    @property
    def error(self) -> StateholdError | None:
        """Why the save failed, or None."""
        return self._passage.error

    def done(self, event: Event = "committed") -> bool:
        """Whether the event has happened. False if the save failed before it, or was skipped."""
        return self._passage.done(_checked(event))

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
        self._passage.wait(event, timeout)
        return self

    def __repr__(self) -> str:
        state = f"failed: {self.error.summary}" if self.error else str(self.stats)
        if self.is_skipped:
            state = f"step {self.step}: not due"
        return f"<statehold.Save {state}>"


class Passage:
    """A save on its way through the events, for those who take it there. Thread-safe.

    step, stats, error, is_skipped: as Save has them. is_raised: a caller has got the error. watch:
    sees what happens. stage: a stage of this save, for the trace. moving_from: when the engine
    begins.
    """

    def __init__(
        self, step: int, started: float, watch: Watch = UNWATCHED, *, is_skipped: bool = False
    ) -> None:
        self.step = step
        self.is_skipped = is_skipped
        self._figures = dict[str, Any]()  # of SaveStats
        self.error: StateholdError | None = None
        self.is_raised = False
        self._started = started
        self.watch = watch
        self.stage = partial(watch.stage, step=step)
        self._is_reported = False
        self.moving_from = started
        self._guard = threading.RLock()
        self._latches: list[threading.Lock] = []  # each is released once, at the next event
        self._pid = os.getpid()

    @property
    def stats(self) -> SaveStats:
        return SaveStats(self.step, **self._figures)

    def done(self, event: Event) -> bool:
        """Whether the event has happened."""
        return f"{event}_s" in self._figures

    def wait(self, event: Event, timeout: float | None = None) -> None:
        """Save.wait(), also inside a call of the Checkpointer."""
        if self.is_skipped:
            raise UsageError(
                f"step {self.step} was not due, so nothing was saved",
                hint="check is_skipped before waiting; save(step, state, force=True) always saves",
            )
        if timeout is not None:
            timeout = check_timeout(timeout)
        attained = self.wait_ended(_checked(event), timeout)
        if self.done(event):
            return
        if attained and self.error is not None:
            self.is_raised = True
            raise self.error
        raise WaitTimeout(
            f"step {self.step} was not {event} in time",
            facts={"waited": f"{timeout} s", "so far": str(self.stats)},
            hint="the save continues in the background; committed steps are untouched",
        )

    def wait_ended(self, event: Event, timeout: float | None = None) -> bool:
        """Wait for the event or a failure. False if neither came in time. Holds no lock, so a
        signal handler may save meanwhile."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.has_ended(event):
            if not self.is_of_this_process:
                raise forked("this save", self._pid)
            latch = threading.Lock()
            latch.acquire()
            self._latches.append(latch)
            if self.has_ended(event):  # since it was last looked at
                return True
            left = -1.0 if until is None else max(0.0, until - time.monotonic())
            if not latch.acquire(timeout=left):
                with contextlib.suppress(ValueError):  # it is being released just now
                    self._latches.remove(latch)
                return self.has_ended(event)
        return True

    def has_ended(self, event: Event) -> bool:
        """Whether the event has happened, or never will."""
        return self.done(event) or self.error is not None

    def _wake(self) -> None:
        while self._latches:
            with contextlib.suppress(IndexError):  # the last one has stopped waiting
                self._latches.pop().release()

    @property
    def is_of_this_process(self) -> bool:
        return os.getpid() == self._pid

    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def record(self, **figures: object) -> None:
        self._figures.update(figures)

    def returned(self) -> None:
        """save() ends now."""
        self.record(blocked_s=self.elapsed())
        self.watch.save_returned(self._started, self.stats)
        self._report_once()

    def _report_once(self) -> None:
        """Report a committed save once all its figures are known.

        A small save commits before save() returns.
        """
        with self._guard:
            is_known = self.done("committed") and "blocked_s" in self._figures
            is_due = is_known and not self._is_reported
            self._is_reported |= is_known
        if is_due:
            self.watch.save_committed(self._started, self.stats)

    def add_gate(self, seconds: float) -> None:
        with self._guard:
            self._figures["gate_s"] = self._figures.get("gate_s", 0.0) + seconds
        self.watch.gate_waited(seconds)

    def reach(self, event: Event) -> None:
        self.record(**{f"{event}_s": self.elapsed()})
        self._wake()
        self._report_once()

    def fail(self, error: StateholdError) -> None:
        with self._guard:
            self.error = error
        self._wake()
        self.watch.save_failed(self._started, self.stats)

    def unraised_error(self) -> StateholdError | None:
        """The error, if nothing has raised it yet. The caller raises it.

        An error that only follows from another rank's report is not raised. Otherwise that rank
        would have to skip the next save, and the ranks would fail each other's saves for ever.
        """
        with self._guard:
            if self.error is None or self.is_raised:
                return None
            if isinstance(self.error, PeerFailedError) and self.error.follows:
                return None
            self.is_raised = True
            return self.error


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


# -- functions that are called after a commit ------------------------------------------------------
# Callbacks run on a thread of their own. No save and no step of the trainer waits for a callback,
# and none fails because of one. Callbacks come in the order of commits, one at a time. What a
# callback raises is logged. If one hangs, later commits wait for it in a queue of QUEUED_MAX;
# beyond that they are left out, and a warning says so. The end of a session waits CLOSE_S for
# callbacks, and the end of the program not at all.


QUEUED_MAX = 100
CLOSE_S = 10.0


class Callbacks:
    """Calls `callbacks` with each committed save. Without callbacks there is no thread."""

    def __init__(self, callbacks: Sequence[Callable[[Save], object]], log: BackgroundLog) -> None:
        self._callbacks = tuple(callbacks)
        self._log = log
        # Written in C: no exception in close(), as after Ctrl-C, leaves a lock of it taken.
        self._committed: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._at: int | None = None  # the step whose callbacks run
        self._thread = Thread(self._serve, "statehold-callbacks")
        if self._callbacks:
            self._thread.start()

    def committed(self, save: Save) -> None:
        """A step is committed. Returns at once."""
        if not self._callbacks:
            return
        if self._committed.qsize() < QUEUED_MAX:
            self._committed.put(save)
        else:
            self._log.warning(
                "a callback of on_commit has not returned since step %s was committed; step %d is "
                "committed, and no callback is called for it", self._at, save.step,
            )  # fmt: skip

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for the callbacks of what is committed, but no longer than that."""
        if not self._callbacks:
            return
        if self._committed.qsize() >= QUEUED_MAX:  # it hangs; if it ever returns, the thread ends
            timeout_s = 0.0
            with contextlib.suppress(queue.Empty):
                while True:
                    self._committed.get_nowait()
        self._committed.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._log.warning(
                "a callback of on_commit has not returned since step %s was committed; the "
                "Checkpointer closes without it", self._at,
            )  # fmt: skip

    def _serve(self) -> None:
        while (save := self._committed.get()) is not None:
            self._at = save.step
            for callback in self._callbacks:
                try:
                    callback(save)
                except BaseException as error:
                    text = "".join(traceback.format_exception(error)).rstrip()
                    self._log.error(
                        "step %d is committed and safe; a callback of on_commit raised\n%s",
                        save.step, text,
                    )  # fmt: skip
            del save


# -- what the two threads know of a save -----------------------------------------------------------


@dataclass(slots=True)
class Work:
    """One save under way.

    handle: what the trainer has of `save`. number: of the call of save(), the same on all ranks.
    capture: dropped as soon as its bytes are copied. copies: from devices, if there are any.
    place: the level that gets the save. is_attached: the job had its file from the start.
    comparisons, version: what this rank assumes about the others (claims). fingerprinting: makes
        the fingerprints for the comparisons, on the stage thread.
    attempt: names the partial directory, if several ranks save.
    promote: the levels that get the step, known at its commit.
    is_last: the process ends with this save.
    about: what the caller says about the step.
    job: copies and writes, as soon as the save has started.
    register: gets the outcome. shared: the files that it shares with other steps, if there are any.
    stored: the parts of the state that lie in files. taken: when the step has them, all files other
        than the rank's own.
    """

    save: Passage
    handle: Save
    number: int
    plan: RankPlan
    tree: Any
    capture: Capture | None
    place: DirectoryPlace
    register: Register
    is_attached: bool = False
    copies: DeviceCopies | None = None
    comparisons: tuple[Comparison, ...] = ()
    version: str = ""
    fingerprinting: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    fingerprints: dict[str, int] = field(default_factory=dict)
    attempt: str | None = None
    promote: Copies = NO_COPIES
    is_last: bool = False
    about: About = NOTHING
    error: StateholdError | None = None
    shared: SharedFiles | None = None
    stored: list[StoredState] = field(default_factory=list)
    taken: StoredPart = field(default_factory=StoredPart)
    job: WriteJob = field(init=False)

    def release(self) -> None:
        """The save has ended: its objects may use their files as they like."""
        if self.shared is not None:
            self.shared.release(failed=self.error is not None)
        stored, self.stored = self.stored, []
        for each in stored:
            each.release()

    def cancel(self) -> None:
        """Stop the native jobs, if the save has started them."""
        if hasattr(self, "job"):
            self.job.cancel()
        if self.shared is not None:
            self.shared.cancel()

    def let_go(self) -> None:
        """Release the state: it is copied, or nobody needs the copy."""
        self.capture = None
        self.fingerprinting = {}
        if self.copies is not None:
            self.copies.let_go()
