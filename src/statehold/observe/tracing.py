"""A trace of saves and restores: what happened when, and on which thread, as Chrome JSON.

    span       a stage on the thread that does it (`X`); spans of one thread nest
    interval   an event of no single Python thread, such as a whole save (`b` and `e`, by id)
    level      a figure that changes, such as the bytes read so far (`C`)

Invariants: keeps the newest `events_max` events, and says how many were dropped. Thread-safe. An
event costs about a microsecond. Times are wall-clock microseconds in whole numbers, rounded down at
both ends, so spans nest as they did and the traces of several ranks line up.
Not here: the stages (their callers), files (checkpoint/telemetry), the drawing (cli).
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

# A save is about twelve events, an event some 400 bytes: well over a thousand saves in 8 MB.
EVENTS_MAX = 20_000


class _Event(NamedTuple):
    kind: str
    name: str
    begin_s: float
    end_s: float
    thread: tuple[int, str] | None
    facts: Mapping[str, Any]
    key: str = ""


class TracedStage:
    """A stage under way, as a context manager."""

    __slots__ = ("_begin_s", "_facts", "_name", "_trace")

    def __init__(self, trace: Trace, name: str, facts: dict[str, Any]) -> None:
        self._trace = trace
        self._name = name
        self._facts = facts
        self._begin_s = 0.0

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._facts["error"] = kind.__name__
        self._trace.add(self._name, self._begin_s, time.perf_counter(), self._facts)


class Trace:
    """The newest events of one rank. Times in arguments are those of time.perf_counter()."""

    def __init__(self, rank: int = 0, ranks: int = 1, events_max: int = EVENTS_MAX) -> None:
        self._rank = rank
        self._ranks = ranks
        self._events: deque[_Event] = deque(maxlen=events_max)
        self._added = 0
        self._guard = threading.Lock()
        self._epoch_s = time.time() - time.perf_counter()

    def span(self, name: str, **facts: Any) -> TracedStage:
        """A stage that begins when it is entered."""
        return TracedStage(self, name, facts)

    def add(self, name: str, begin_s: float, end_s: float, facts: Mapping[str, Any]) -> None:
        """Record a stage on this thread that has ended."""
        thread = threading.current_thread()
        self._append(_Event("X", name, begin_s, end_s, (thread.ident or 0, thread.name), facts))

    def interval(
        self, name: str, begin_s: float, end_s: float, key: str, facts: Mapping[str, Any]
    ) -> None:
        """Record an interval from `begin_s` to `end_s`; intervals of one `key` are drawn
        together."""
        self._append(_Event("b", name, begin_s, end_s, None, facts, key))

    def level(self, name: str, **figures: float) -> None:
        """Record the present values of some figures."""
        now_s = time.perf_counter()
        self._append(_Event("C", name, now_s, now_s, None, figures))

    def _append(self, event: _Event) -> None:
        with self._guard:
            self._events.append(event)
            self._added += 1

    # -- as a document ---------------------------------------------------------------------

    def encode(self) -> bytes:
        """The trace as JSON, for ui.perfetto.dev, chrome://tracing and `statehold report`."""
        return json.dumps(self.document(), separators=(",", ":"), allow_nan=False).encode()

    def document(self) -> dict[str, Any]:
        """The events of encode(): metadata, then events in the order of their beginnings."""
        with self._guard:
            events, dropped = list(self._events), self._added - len(self._events)
        lanes = _lanes(events)
        timed = [each for event in events for each in self._timed(event, lanes)]
        timed.sort(key=lambda each: (each["ts"], -each.get("dur", 0)))
        other = {"rank": self._rank, "ranks": self._ranks, "dropped_events": dropped}
        metadata = self._metadata(lanes)
        return {"traceEvents": metadata + timed, "displayTimeUnit": "ms", "otherData": other}

    def _metadata(self, lanes: Mapping[tuple[int, str], int]) -> list[dict[str, Any]]:
        name = f"rank {self._rank}" if self._ranks > 1 else "statehold"
        about = {"ph": "M", "pid": self._rank, "tid": 0}
        return [
            {**about, "name": "process_name", "args": {"name": name}},
            {**about, "name": "process_sort_index", "args": {"sort_index": self._rank}},
            *[
                {**about, "name": "thread_name", "tid": lane, "args": {"name": thread}}
                for (_, thread), lane in lanes.items()
            ],
        ]

    def _timed(self, event: _Event, lanes: Mapping[tuple[int, str], int]) -> list[dict[str, Any]]:
        begin, end = self._microseconds(event.begin_s), self._microseconds(event.end_s)
        encoded = {"name": event.name, "cat": "statehold", "ph": event.kind, "pid": self._rank}
        encoded |= {"tid": lanes[event.thread] if event.thread else 0, "ts": begin}
        encoded["args"] = dict(event.facts)
        if event.kind == "X":
            encoded["dur"] = end - begin
        elif event.kind == "b":
            encoded["id"] = event.key
            return [encoded, {**encoded, "ph": "e", "ts": end, "args": {}}]
        return [encoded]

    def _microseconds(self, moment_s: float) -> int:
        return int((moment_s + self._epoch_s) * 1e6)


def _lanes(events: list[_Event]) -> dict[tuple[int, str], int]:
    """A small number for each thread, in the order of their first events."""
    threads = dict.fromkeys(event.thread for event in events if event.thread is not None)
    return {thread: lane for lane, thread in enumerate(threads, 1)}
