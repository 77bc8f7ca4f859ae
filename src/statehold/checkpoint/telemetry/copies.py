"""Telemetry of the copies to one level: stages, figures, progress, and a log line.

    promote   prepare, plan (which files), write or upload (a span for each data file, with the
              seconds spent on reading the source and on waiting for the limit), meet (with the
              other ranks), commit

A file is copied block by block. Reading, verifying and writing take turns, thousands of times in a
long copy, so their times are facts of the file's span and not spans of their own.

Invariants: no report of a step at a level comes before its commit there. Nothing here fails a copy.
Not here: the work of the stages (checkpoint/levels/promoting, checkpoint/levels/copying).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from statehold.errors import ClosedError
from statehold.observe.background_log import BackgroundLog, harmless
from statehold.observe.counters import Figures
from statehold.observe.progress import Counts, Progress
from statehold.observe.tracing import Trace
from statehold.units import format_bytes, format_seconds

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
        self.log.figures(copied_text(facts), facts)

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
        self.bytes = 0
        self.linked_bytes = 0
        self.read_s = 0.0
        self.limited_s = 0.0

    def stage(self, name: str, **facts: Any) -> Stage:
        """A stage on this thread, while the context lasts."""
        return self._level.stage(name, **facts)

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
