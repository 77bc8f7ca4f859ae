"""Where the time of a call goes, and what a restore reads: by wrapping names inside statehold.

Invariants: nothing is wrapped before `install`; a wrapper costs two readings of the clock. Names
that are not there any more are left out, so that the benchmark outlives a change of the inside.
"""

from __future__ import annotations

import functools
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

# What save() does on the caller's thread: label -> class ("" for a function) and name.
_SAVE_PARTS = {
    "check_order": ("Store", "check_order"),
    "capture": ("", "capture"),
    "claims": ("Claims", "resolve"),
    "plan": ("PlanCache", "get"),
    "order": ("FileOrder", "ordered"),
    "start_write": ("", "start_write"),
    "version": ("Claims", "version"),
    "eager": ("Pipeline", "wait_eager"),
}

_seconds: defaultdict[str, float] = defaultdict(float)
_jobs: list[Any] = []


def install() -> None:
    """Wrap everything; once a process, when all of statehold is imported."""
    for label, (owner, name) in _SAVE_PARTS.items():
        _wrap(owner, name, functools.partial(_timed, label))
    _wrap("ReadPlan", "start", _counted)


def take_seconds() -> dict[str, float]:
    """Seconds by part since the last call."""
    found = dict(_seconds)
    _seconds.clear()
    return found


def take_reads() -> dict[str, int]:
    """Sums of the statistics of the reads since the last call."""
    found: dict[str, int] = defaultdict(int)
    for job in _jobs:
        for key, value in job.stats.items():
            found[key] += value
    _jobs.clear()
    return dict(found)


def _wrap(owner: str, name: str, wrapper: Callable[[Any], Any]) -> None:
    """In the class `owner`, or wherever a function of that name was imported to."""
    modules = [each for key, each in sys.modules.items() if key.startswith("statehold")]
    holders = {vars(each).get(owner) for each in modules} - {None} if owner else modules
    for holder in holders:
        found = vars(holder).get(name)
        if isinstance(found, property) and found.fget is not None:
            setattr(holder, name, property(wrapper(found.fget)))
        elif isinstance(found, types.FunctionType):
            setattr(holder, name, wrapper(found))


def _timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            _seconds[label] += time.perf_counter() - begin

    return timed


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        reading = function(*arguments, **options)
        _jobs.append(reading.job)
        return reading

    return counted
