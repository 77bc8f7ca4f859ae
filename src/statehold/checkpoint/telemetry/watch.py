"""The telemetry of a Checkpointer: a trace on request, figures, and log lines.

    save     save() (wait, capture, plan) on the trainer's thread; stage; open, write,
             commit (of several ranks: seal, arrive, gather, publish), retain
    restore  discover, plan (open), read (verify: each piece is checked and placed), values
    promote  prepare, plan (which files), write or upload (a span for each data file, with the
             seconds spent on reading the source and on waiting for the limit), meet (with the
             other ranks), commit

Each save, restore and copy that has ended well is one INFO line of the logger "statehold": a
sentence for people, and its figures as `record.statehold` for programs.

Invariants: no report of a step comes before its commit, at whichever level. An error here (a filter
of a user's logging, a full disk under a trace) never fails a save, a restore or a copy.

Not here: the work of the stages; the spans (tracing), names of figures (counters), progress.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from statehold.errors import ClosedError, StateholdError, UsageError, storing
from statehold.layout.share import Balance
from statehold.observe.background_log import BackgroundLog, Counts, Progress, harmless
from statehold.observe.counters import Figures, figures_of
from statehold.observe.tracing import Trace
from statehold.process.whole_files import replace_file
from statehold.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from statehold._core import ReadJob
    from statehold.format.selection import RestoreReport


# -- a Checkpointer --------------------------------------------------------------------------------


class Watch:
    """The trace and the figures of one Checkpointer; thread-safe.

    trace: the file of the trace. recorded: its earlier events, if several Checkpointers write one
        file. log: takes the lines; each is written soon, on a thread of its own.
    """

    def __init__(
        self,
        run: str | None,
        rank: int = 0,
        ranks: int = 1,
        trace: str | os.PathLike[str] | None = None,
        log: BackgroundLog | None = None,
        recorded: Trace | None = None,
    ) -> None:
        self.log = log or BackgroundLog()
        self._figures = Figures({}) if run is None else figures_of(run, rank)
        self._rank, self._ranks = rank, ranks
        self._trace = None if trace is None else recorded or Trace(rank, ranks)
        self._path = None if trace is None else os.path.abspath(self._named(trace))

    def stage(self, name: str, **facts: Any) -> Stage:
        """A stage on this thread, while the context lasts."""
        return _UNSEEN if self._trace is None else self._trace.span(name, **facts)

    def level(self, name: str, moving: str = "write") -> LevelWatch:
        """A level that gets copies."""
        figures = self._figures.of_level(name)
        return LevelWatch(name, self._rank, self._trace, figures, self.log, moving)

    # -- saves -----------------------------------------------------------------------------

    @harmless
    def save_began(self) -> None:
        self._figures.add("saves_in_flight")

    @harmless
    def save_returned(self, started_s: float, stats: SaveStats) -> None:
        self._figures.observe("save_blocked_seconds", stats.blocked_s)
        if self._trace is not None:
            facts = {"step": stats.step, "bytes": stats.state_bytes, "tensors": stats.tensors}
            self._trace.add("save()", started_s, started_s + stats.blocked_s, facts)

    @harmless
    def gate_waited(self, seconds: float) -> None:
        self._figures.add("gate_wait_seconds_total", seconds)

    @harmless
    def save_moved(self, step: int, began_s: float, engine: Mapping[str, int]) -> None:
        """The engine's own figures of a save, in nanoseconds since it began."""
        facts = {"step": step, "bytes": engine["bytes"], "blocks": engine["blocks"]}
        for name, begin_ns, end_ns in (
            ("copy", 0, engine["copy_ns"]),
            ("transfer", engine["first_write_ns"], engine["write_ns"]),
        ):
            self._interval(name, began_s + begin_ns / 1e9, began_s + end_ns / 1e9, facts)

    @harmless
    def save_committed(self, started_s: float, stats: SaveStats) -> None:
        assert stats.committed_s is not None
        facts = {"event": "save", "rank": self._rank, **_of_save(stats)}
        self._figures.add("saves_in_flight", -1)
        self._figures.add("saves_committed_total")
        self._figures.add("written_bytes_total", stats.written_bytes)
        self._figures.observe("save_seconds", stats.committed_s)
        self._figures.set("newest_step", stats.step)
        self._figures.set("state_bytes", stats.state_bytes)
        self._figures.set("committed_timestamp_seconds", time.time())
        self._interval("save", started_s, started_s + stats.committed_s, facts)
        self.log.figures(partial(save_text, stats), facts)

    @harmless
    def save_failed(self, started_s: float, stats: SaveStats) -> None:
        self._figures.add("saves_in_flight", -1)
        self._figures.add("saves_failed_total")
        facts = {"event": "failed save", "rank": self._rank, **_of_save(stats)}
        self._interval("failed save", started_s, time.perf_counter(), facts)

    def _interval(self, name: str, begin_s: float, end_s: float, facts: Mapping[str, Any]) -> None:
        if self._trace is not None:
            self._trace.interval(name, begin_s, end_s, f"save {facts['step']}", facts)

    # -- restores --------------------------------------------------------------------------

    @contextlib.contextmanager
    def restore(self) -> Iterator[RestoreWatch]:
        """One call of restore()."""
        begin_s = time.perf_counter()
        watch = RestoreWatch(self)
        try:
            yield watch
        except BaseException as error:
            self._restore_failed(begin_s, type(error).__name__)
            raise
        self._restored(watch, begin_s, time.perf_counter())

    @harmless
    def _restore_failed(self, begin_s: float, error: str) -> None:
        self._figures.add("restores_failed_total")
        if self._trace is not None:
            facts = {"rank": self._rank, "error": error}
            self._trace.add("failed restore", begin_s, time.perf_counter(), facts)

    @harmless
    def _restored(self, watch: RestoreWatch, begin_s: float, end_s: float) -> None:
        self._figures.add("steps_passed_over_total", watch.passed_over)
        seconds = end_s - begin_s
        facts = {"event": "restore", "rank": self._rank, "step": watch.restored_step,
                "read_bytes": watch.read_bytes, "seconds": seconds,
                "passed_over": watch.passed_over}  # fmt: skip
        if self._trace is not None:
            self._trace.add("restore", begin_s, end_s, facts)
        if watch.restored_step is None:  # the run has no step: nothing was restored
            return
        self._figures.add("restores_total")
        self._figures.add("restored_bytes_total", watch.read_bytes)
        self._figures.observe("restore_seconds", seconds)
        self._figures.set("restored_step", watch.restored_step)
        self.log.figures(partial(restore_text, facts), facts)

    # -- the trace -------------------------------------------------------------------------

    @harmless
    def read_so_far(self, done: int, total: int) -> None:
        if self._trace is not None:
            self._trace.level("restored bytes", done=done, total=total)

    def write_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the trace, whole or not at all; returns the file's name."""
        if self._trace is None or self._path is None:
            raise UsageError(
                "this Checkpointer records no trace",
                hint='open it with trace="trace.json", or the name of another file',
            )
        target = self._path if path is None else os.path.abspath(self._named(path))
        with storing("write the trace", target):
            replace_file(target, self._trace.encode())
        return target

    def close(self) -> None:
        """Write the trace if there is one; an error does not fail the run."""
        if self._trace is not None:
            try:
                self.write_trace()
            except StateholdError as error:
                self.log.warning("%s", error)

    def _named(self, path: str | os.PathLike[str]) -> str:
        """Each of several ranks has a file: trace.json becomes trace.rank-00003.json."""
        text = os.fspath(path)
        if self._ranks == 1:
            return text
        stem, suffix = os.path.splitext(text)
        return f"{stem}.rank-{self._rank:05d}{suffix}"


def check_trace(path: str | os.PathLike[str] | None, run: str) -> None:
    """Refuse a trace in a directory that does not exist, unless it is the run's directory."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) and os.path.commonpath([folder, run]) != folder:
        raise UsageError(
            "the directory of the trace does not exist",
            facts={"trace": os.fspath(path), "directory": folder},
            hint="make it, or name a file elsewhere",
        )
    if os.path.isdir(path):
        raise UsageError(
            "the trace is a directory",
            facts={"expected": "the path of a file", "got": os.fspath(path)},
            hint=f'name a file in it: "{os.path.join(path, "trace.json")}"',
        )


class RestoreWatch:
    """One restore: the bytes read, and the result."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.stage = watch.stage
        self.read_bytes = 0
        self.restored_step: int | None = None
        self.passed_over = 0

    @contextlib.contextmanager
    def reading(self, step: int, job: ReadJob) -> Iterator[None]:
        """Bytes are moving: logs their progress if that takes long."""

        def counts() -> tuple[int, int]:
            stats = job.stats
            return stats["cached_bytes"] + stats["direct_bytes"], stats["bytes"]

        with self.stage("verify", step=step):
            watch = self._watch
            with Progress(f"restoring step {step}", counts, watch.read_so_far, watch.log):
                yield
            self.read_bytes += job.stats["bytes"]

    def end(self, report: RestoreReport | None, passed_over: Sized) -> None:
        """The result; nothing is reported before the context is left."""
        self.restored_step = None if report is None else report.step
        self.passed_over = len(passed_over)


UNWATCHED = Watch(None)


def _of_save(stats: SaveStats) -> dict[str, Any]:
    names = ("step", "state_bytes", "eager_bytes", "written_bytes", "tensors", "reused",
             "blocked_s", "waited_s", "gate_s", "staged_s", "written_s", "committed_s")  # fmt: skip
    return {name: getattr(stats, name) for name in names}


def save_text(stats: SaveStats) -> str:
    """ "step 100 committed: 4.54 GiB in 612 ms (7.41 GiB/s), training blocked 15 ms"."""
    assert stats.committed_s is not None
    rate = format_bytes(int(stats.written_bytes / max(stats.committed_s, 1e-9)))
    took = f"{format_bytes(stats.written_bytes)} in {format_seconds(stats.committed_s)} ({rate}/s)"
    blocked_s = stats.blocked_s + stats.gate_s  # 0: torch has not said
    blocked = f", training blocked {format_seconds(blocked_s)}" if blocked_s else ""
    return f"step {stats.step} committed: {took}{blocked}"


def restore_text(facts: Mapping[str, Any]) -> str:
    """ "step 100 restored: 4.54 GiB read and verified in 1.2 s (3.78 GiB/s)"."""
    rate = format_bytes(int(facts["read_bytes"] / max(facts["seconds"], 1e-9)))
    took = f"{format_bytes(facts['read_bytes'])} read and verified in"
    text = f"step {facts['step']} restored: {took} {format_seconds(facts['seconds'])} ({rate}/s)"
    passed = facts["passed_over"]
    return text + (f"; damaged and passed over: {passed}" if passed else "")


# -- copies to a level -----------------------------------------------------------------------------
# A file is copied block by block. Reading, verifying and writing take turns, thousands of times in
# a long copy, so their times are facts of the file's span and not spans of their own.


Stage = contextlib.AbstractContextManager[None]

_UNSEEN: Stage = contextlib.nullcontext()


@dataclass(eq=False)
class LevelWatch:
    """One level of one Checkpointer, as one rank sees it.

    moving: the name of the stage that moves its files, "write" or "upload".
    """

    level: str
    rank: int
    trace: Trace | None
    figures: Figures
    log: BackgroundLog
    moving: str = "write"

    def stage(self, name: str, **facts: Any) -> Stage:
        """A stage on this thread, while the context lasts."""
        return _UNSEEN if self.trace is None else self.trace.span(name, level=self.level, **facts)

    @contextlib.contextmanager
    def copy(self, step: int, counts: Counts) -> Iterator[CopyWatch]:
        """One copy of this rank's part of a step, until it is committed.

        counts: bytes done, and in all, of the copy under way.
        """
        begin_s = time.perf_counter()
        copy = CopyWatch(self, self.moving)
        try:
            with Progress(f"copying step {step} to level {self.level}", counts, self._seen,
                          self.log):  # fmt: skip
                yield copy
        except BaseException as error:
            facts = self._facts(step, copy, begin_s)
            self._failed(begin_s, {**facts, "event": "failed copy", "error": type(error).__name__})
            if not isinstance(error, ClosedError):  # the run ends: it was stopped
                self.figures.add("level_copies_failed_total")
            raise
        self._committed(begin_s, self._facts(step, copy, begin_s))

    @harmless
    def newest(self, step: int) -> None:
        """The newest step at the level."""
        self.figures.set("level_newest_step", step)

    @harmless
    def interval(self, seconds: float) -> None:
        """The interval of the level, if it was chosen."""
        self.figures.set("level_interval_seconds", seconds)

    @harmless
    def landed(self, step: int) -> None:
        """`step` was just committed at the level."""
        self.figures.set("level_newest_step", step)
        self.figures.set("level_committed_timestamp_seconds", time.time())

    def _facts(self, step: int, copy: CopyWatch, begin_s: float) -> dict[str, Any]:
        return {
            "event": "copy",
            "rank": self.rank,
            "step": step,
            "level": self.level,
            "bytes": copy.bytes,
            "linked_bytes": copy.linked_bytes,
            "seconds": time.perf_counter() - begin_s,
            "read_s": copy.read_s,
            "limited_s": copy.limited_s,
        }

    @harmless
    def _seen(self, done: int, total: int) -> None:
        if self.trace is not None:
            self.trace.level(f"copied to {self.level}", done=done, total=total)

    @harmless
    def _committed(self, begin_s: float, facts: dict[str, Any]) -> None:
        self._span("promote", begin_s, facts)
        self.figures.add("level_copied_bytes_total", facts["bytes"])
        self.figures.observe("level_copy_seconds", facts["seconds"])
        self.landed(facts["step"])
        self.log.figures(partial(copied_text, facts), facts)

    @harmless
    def _failed(self, begin_s: float, facts: dict[str, Any]) -> None:
        self._span("failed promote", begin_s, facts)

    def _span(self, name: str, begin_s: float, facts: dict[str, Any]) -> None:
        if self.trace is not None:
            self.trace.add(name, begin_s, begin_s + facts["seconds"], facts)


class CopyWatch:
    """One copy: its stages, and its times. Used by the thread that copies."""

    def __init__(self, level: LevelWatch, moving: str) -> None:
        self._level = level
        self._moving = moving
        self.stage = level.stage
        self.bytes = 0
        self.linked_bytes = 0
        self.read_s = 0.0
        self.limited_s = 0.0

    @contextlib.contextmanager
    def file(self, name: str, nbytes: int) -> Iterator[None]:
        """A data file that is being copied."""
        facts: dict[str, Any] = {"file": name, "bytes": nbytes}
        read_s, limited_s = self.read_s, self.limited_s
        begin_s = time.perf_counter()
        try:
            yield
            self.bytes += nbytes
        finally:
            facts["read_s"], facts["limited_s"] = self.read_s - read_s, self.limited_s - limited_s
            self._level._span(self._moving, begin_s,
                              {**facts, "seconds": time.perf_counter() - begin_s})  # fmt: skip

    def linked(self, nbytes: int) -> None:
        """A data file that the level has already got a second name, or the level has copied it
        itself."""
        self.linked_bytes += nbytes

    def reading(self, read: Callable[[], None]) -> None:
        """Call `read`, which reads from the source."""
        begin_s = time.perf_counter()
        read()
        self.read_s += time.perf_counter() - begin_s

    def limiting(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which waits for the limit, and for saves."""
        begin_s = time.perf_counter()
        wait()
        self.limited_s += time.perf_counter() - begin_s


def copied_text(facts: dict[str, Any]) -> str:
    """ "step 100 is committed at level objects: 4.54 GiB in 12.1 s (384 MiB/s)"."""
    rate = format_bytes(int(facts["bytes"] / max(facts["seconds"], 1e-9)))
    took = f"{format_bytes(facts['bytes'])} in {format_seconds(facts['seconds'])} ({rate}/s)"
    limited = facts["limited_s"]
    waited = f"; it waited {format_seconds(limited)} for its turn" if limited > 0.1 else ""
    linked = facts["linked_bytes"]
    shared = f"; it shares {format_bytes(linked)} with other steps" if linked else ""
    return f"step {facts['step']} is committed at level {facts['level']}: {took}{shared}{waited}"


# -- the figures of a save -------------------------------------------------------------------------


Event = Literal["staged", "written", "committed"]
EVENTS: tuple[Event, ...] = get_args(Event)


@dataclass(frozen=True, slots=True)
class SaveStats:
    """Figures of one save. Seconds count from the call of save(); None means not yet.

    Attributes:
        step: the step.
        state_bytes: what this rank holds.
        eager_bytes: the part of state_bytes that was copied before save() returned.
        written_bytes: what this rank writes.
        linked_bytes: of files that were on storage before, and that the step holds without a copy.
        tensors: how many tensors this rank holds.
        files: the files of this rank, those that were on storage before included.
        reused: whether the save overwrote the file of an earlier step.
        blocked_s: how long save() itself took.
        waited_s: the part of blocked_s spent waiting for an earlier save.
        gate_s: how long optimizers (or gate()) waited for this save.
        staged_s: when every byte was copied.
        written_s: when this rank's bytes were durable.
        committed_s: when the step was published.
        balance: how evenly all ranks and their hosts write, known when committed.
    """

    step: int
    state_bytes: int = 0
    eager_bytes: int = 0
    written_bytes: int = 0
    linked_bytes: int = 0
    tensors: int = 0
    files: int = 0
    reused: bool = False
    blocked_s: float = 0.0
    waited_s: float = 0.0
    gate_s: float = 0.0
    staged_s: float | None = None
    written_s: float | None = None
    committed_s: float | None = None
    balance: Balance | None = None

    def __str__(self) -> str:
        text = f"step {self.step}: {format_bytes(self.state_bytes)}"
        text += f", blocked {format_seconds(self.blocked_s + self.gate_s)}"
        for event in EVENTS:
            seconds = getattr(self, f"{event}_s")
            text += f", {event} " + ("not yet" if seconds is None else format_seconds(seconds))
        return text
