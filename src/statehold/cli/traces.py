"""Trace files, read back: spans by lane, saves and restores, on one clock.

Owns: the parts of a trace that a report uses. A trace of another tool in the same form gives a
timeline, too.
Invariants: a file is bounded, and nothing in it is trusted. An event that is not well-formed is
left out and counted. A file that is not a trace is an error.
Not here: writing traces (observe/tracing), drawing them (page).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from statehold.errors import UsageError

TRACE_BYTES_MAX = 128 * 1024 * 1024
# Of all files together. The newest are kept. A page with more is slow and hard to read.
MARKS_MAX = 6000
RANK_MAX = 10**6
FACT_MAX = 2**63

_ENGINE = "engine"
# Below the threads of the program.
_ORDER = {"statehold-stage_0": 1, "statehold-commit_0": 2, _ENGINE: 3}


@dataclass(frozen=True, slots=True)
class DrawnStage:
    """A stage on the timeline, in microseconds of wall-clock time."""

    name: str
    begin: int
    end: int
    facts: dict[str, Any]


@dataclass(slots=True)
class TimelineRow:
    """A thread of a rank, or its engine: marks in the order of their beginnings."""

    rank: int
    thread: str
    marks: list[DrawnStage] = field(default_factory=list)


@dataclass(slots=True)
class Traces:
    """The contents of all files.

    saves, restores, copies (to other levels): the facts of each that has ended, with its `begin`
    and `end`.
    """

    lanes: list[TimelineRow] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    restores: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0


def read_traces(paths: Iterable[str]) -> Traces:
    """Read trace files. Raises UsageError for a file that is not a trace."""
    found = Traces()
    for path in paths:
        for rank, thread, mark in _File(path, found):
            _sort_in(found, rank, thread, mark)
    found.lanes.sort(key=lambda lane: (lane.rank, _ORDER.get(lane.thread, 0)))
    _bound(found)
    return found


def _sort_in(found: Traces, rank: int, thread: str, mark: DrawnStage) -> None:
    event = mark.facts.get("event")
    about = {**mark.facts, "rank": rank, "begin": mark.begin, "end": mark.end}
    if type(mark.facts.get("step")) is int:
        if thread == _ENGINE and event in ("save", "failed save"):
            found.saves.append(about)  # the whole save: the lanes show its stages
            return
        if event == "restore":
            found.restores.append(about)
        if event in ("copy", "failed copy"):
            found.copies.append(about)
    lane = next((x for x in found.lanes if (x.rank, x.thread) == (rank, thread)), None)
    if lane is None:
        lane = TimelineRow(rank, thread)
        found.lanes.append(lane)
    lane.marks.append(mark)


def _bound(found: Traces) -> None:
    begins = sorted((mark.begin for lane in found.lanes for mark in lane.marks), reverse=True)
    if len(begins) > MARKS_MAX:
        since = begins[MARKS_MAX]
        found.left_out += len(begins) - MARKS_MAX
        for lane in found.lanes:
            lane.marks = [mark for mark in lane.marks if mark.begin > since]
    for lane in found.lanes:
        lane.marks.sort(key=lambda mark: (mark.begin, -mark.end))


class _File:
    """The marks of one file: spans as they are, intervals from their two halves."""

    def __init__(self, path: str, found: Traces) -> None:
        self._events = _events_of(path)
        self._found = found
        self._threads: dict[tuple[int, int], str] = {}
        self._begun: dict[tuple[int, str, str], tuple[int, dict[str, Any]]] = {}

    def __iter__(self) -> Iterator[tuple[int, str, DrawnStage]]:
        for event in self._events:
            try:
                yield from self._marks(event)
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self._found.left_out += 1

    def _marks(self, event: dict[str, Any]) -> Iterator[tuple[int, str, DrawnStage]]:
        kind, rank = event["ph"], _rank(event["pid"])
        if kind == "M":
            if event["name"] == "thread_name":
                self._threads[rank, int(event["tid"])] = _text(event["args"]["name"])
        elif kind == "X":
            lane = int(event["tid"])
            begin, name = _time(event["ts"]), _text(event["name"])
            mark = DrawnStage(name, begin, begin + _time(event["dur"]), _facts(event))
            yield rank, self._threads.get((rank, lane), f"thread {lane}"), mark
        elif kind in ("b", "e"):
            yield from self._halves(event, rank)

    def _halves(self, event: dict[str, Any], rank: int) -> Iterator[tuple[int, str, DrawnStage]]:
        name = _text(event["name"])
        key = rank, _text(event["id"]), name
        if event["ph"] == "b":
            self._begun[key] = _time(event["ts"]), _facts(event)
        elif key in self._begun:
            begin, facts = self._begun.pop(key)
            yield rank, _ENGINE, DrawnStage(name, begin, max(begin, _time(event["ts"])), facts)


def _events_of(path: str) -> list[Any]:
    size = os.stat(path).st_size
    if size > TRACE_BYTES_MAX:
        facts = {"file": path, "expected": f"up to {TRACE_BYTES_MAX} bytes", "got": size}
        raise UsageError("a trace is too large", facts=facts)
    with open(path, "rb") as file:
        raw = file.read()
    try:
        document = json.loads(raw)
        events = document["traceEvents"] if isinstance(document, dict) else document
        if isinstance(events, list):
            return events
    except (ValueError, KeyError, RecursionError):
        pass
    hint = "pass a file that Checkpointer(..., trace=PATH) wrote"
    raise UsageError("not a trace", facts={"file": path}, hint=hint)


def _facts(event: dict[str, Any]) -> dict[str, Any]:
    """The plain facts: numbers that are numbers and no larger than any that is measured, and
    text."""
    return {
        _text(key): value
        for key, value in event.get("args", {}).items()
        if isinstance(value, str) or (isinstance(value, int | float) and abs(value) < FACT_MAX)
    }


def _rank(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= RANK_MAX:
        raise ValueError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _time(value: Any) -> int:
    number = int(value)
    if isinstance(value, str) or not 0 <= number < 2**53:
        raise ValueError(value)
    return number
