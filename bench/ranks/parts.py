"""Where the time of a call goes, and what a restore reads: by wrapping names inside statehold.

Holds: nothing is wrapped before `install`; a wrapper costs two readings of the clock. Names that
are not there any more are left out, so that the benchmark outlives a change of the inside.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

# What save() does on the caller's thread: label -> module, object, attribute.
_SAVE_PARTS = {
    "capture": ("statehold.checkpointer", "", "capture"),
    "claims": ("statehold.planning.claims", "Claims", "resolve"),
    "plan": ("statehold.planning.share", "PlanCache", "get"),
    "fingerprints": ("statehold.state.fingerprints", "", "begin"),
    "order": ("statehold.checkpointer", "", "in_file_order"),
    "start_write": ("statehold.checkpointer", "", "start_write"),
    "version": ("statehold.planning.claims", "Claims", "version"),
    "check_order": ("statehold.storage.store", "Store", "check_order"),
    "eager": ("statehold.pipeline", "Pipeline", "wait_eager"),
}

_seconds: defaultdict[str, float] = defaultdict(float)
_jobs: list[Any] = []


def install() -> None:
    """Wrap everything; once a process."""
    for label, where in _SAVE_PARTS.items():
        _wrap(*where, functools.partial(_timed, label))
    _wrap("statehold.reads", "ReadPlan", "start", _counted)


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


def _wrap(module: str, owner: str, name: str, wrapper: Callable[[Any], Any]) -> None:
    holder = importlib.import_module(module)
    if owner:
        holder = getattr(holder, owner, None)
    found = vars(holder).get(name) if holder else None
    if isinstance(found, property) and found.fget is not None:
        setattr(holder, name, property(wrapper(found.fget)))
    elif found is not None:
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
