"""`statehold report RUN|STORE -o FILE`: one self-contained page about a run, or about a store of KV
pages; or its data, with --json.

Owns: the data of the page: steps at all levels. With traces also the saves, restores and copies,
with all ranks of a save together.
Invariants: reads manifests, traces and, with --verify, everything else. Changes nothing in the run,
and writes the page whole or not at all.
Not here: the look (page), the content of a trace (traces), what counts as damage (checking).
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from statistics import median
from typing import Any

from statehold._core import Fs
from statehold._version import __version__
from statehold.cli import codes, show
from statehold.cli.levels import FoundLevel, copies_of, far_options, levels_of, steps_of
from statehold.cli.output import emit, flush, say, table
from statehold.cli.page import count_rows, page_of, page_of_store
from statehold.cli.places import leftovers_of
from statehold.cli.traces import Traces, read_traces
from statehold.cli.verify import document_of, verified_copy
from statehold.errors import StateholdError, UsageError
from statehold.kv.batch import COUNTED
from statehold.kv.looking import counts, look
from statehold.kv.tiers import ABOUT
from statehold.process.whole_files import replace_file
from statehold.reading.places import NotFoundError, StepPlace, file_system, run_at
from statehold.units import parse_bytes

# -- the command -----------------------------------------------------------------------------------


# The largest tensors of the newest step.
TENSORS_SHOWN = 25


def run(args: argparse.Namespace) -> int:
    if "store" in args:
        return _serve_stats(args)
    if args.output is None and not args.json:
        hint = "pass -o report.html, or --json for the data alone"
        raise UsageError("report needs a file for the page", hint=hint)
    is_store = os.path.exists(f"{args.run}/{ABOUT}")
    path = args.run if is_store else run_at(args.run)
    folder = os.path.dirname(args.output or "") or "."
    if not os.path.isdir(folder):  # known before hours of --verify
        facts = {"expected": "a directory", "got": folder, "page": args.output}
        hint = f"make it first: mkdir -p {shlex.quote(folder)}"
        raise NotFoundError("no such directory for the page", facts=facts, hint=hint)
    made = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "writer": f"statehold {__version__}",
        "verified": args.verify,
    }
    if is_store:
        if args.trace or args.limit or args.levels:
            hint = "--verify reads every page"
            raise UsageError("--trace, --limit and --levels are for reports of runs", hint=hint)
        seen = look(path, verify=args.verify)
        parts = {**vars(seen), "geometry": asdict(seen.geometry)}
        document = {"store": path, **made, **parts, "counts": _counts(path)}
        page = page_of_store(document)
        code = codes.NO if seen.bad and args.verify else codes.YES
    else:
        traces = read_traces(args.trace)
        document = {"run": path, **made, **_document(file_system(), path, traces, args)}
        page = page_of(document, traces) if args.output is not None else ""
        is_damaged = any(step["state"] == "damaged" for step in document["steps"])
        states = [level["state"] for level in document["levels"]]
        code = codes.code_at_levels(states, is_damaged=is_damaged)
    if args.output is not None:
        is_file = replace_file(args.output, page.encode("utf-8", "backslashreplace"))
    if args.json:
        emit(document)
    elif is_file:  # and not /dev/stdout, which has the page
        say(args.output)
    return code


def _document(fs: Fs, path: str, traces: Traces, args: argparse.Namespace) -> dict[str, Any]:
    looked = levels_of(fs, path, far=args.levels, options=far_options(args.option))
    if args.verify:
        _verify(fs, looked)
    steps = [_step(looked, step) for step in steps_of(looked)]
    levels = [level.document() for level in looked]
    saves = _saves(traces.saves)
    limit = levels[0]["limit_bytes_per_s"] if args.limit is None else parse_bytes(args.limit)
    return {
        "steps": steps,
        "other": leftovers_of(fs, path),
        "levels": levels,
        "newest": _newest(fs, looked),
        "limit_bytes_per_s": limit,
        "costs": costs_of(saves),
        "saves": saves,
        "restores": [_restore(each) for each in traces.restores],
        "copies": [_copy(each) for each in sorted(traces.copies, key=lambda each: each["begin"])],
        "left_out_events": traces.left_out,
    }


def _verify(fs: Fs, looked: Iterable[FoundLevel]) -> None:
    """Every copy that can be read."""
    for level in looked:
        for step, copy in level.held.items():
            if copy["state"] == "newer format":
                continue
            for report, seconds in verified_copy(fs, level, step):
                copy["integrity"] = {**document_of(report, seconds), "path": copy["path"]}
                if not report.is_intact:
                    copy["state"] = "damaged"


def _step(looked: Sequence[FoundLevel], step: int) -> dict[str, Any]:
    """A step as its first damaged copy has it, or else its nearest whole or partial copy; and all
    copies."""
    copies = [{"level": level.entry.name, **copy} for level, copy in copies_of(looked, step)]
    damaged = [copy for copy in copies if copy["state"] == "damaged"]
    whole = [copy for copy in copies if copy["state"] != "part"]
    shown = (damaged or whole or copies)[0]
    known = next((copy for copy in copies if "created" in copy), {})
    return {**known, **shown, "copies": copies}


def _newest(fs: Fs, looked: Sequence[FoundLevel]) -> dict[str, Any] | None:
    """The contents of the newest step that is readable near by: dtypes, and the largest tensors."""
    near = [level for level in looked if level.entry.kind != "objects"]
    for step in reversed(steps_of(near)):
        for _, copy in copies_of(near, step):
            try:
                place = StepPlace(copy["path"], step, copy["path"])
                contents = show.describe(fs, place.open(fs), place)
            except StateholdError:  # the table of steps has the problem
                continue
            tensors = sorted(
                contents["tensors"], key=lambda tensor: (-tensor["bytes"], tensor["name"])
            )
            keys = ("step", "tensor_bytes", "dtypes")
            shown = {"tensor_count": len(tensors), "largest": tensors[:TENSORS_SHOWN]}
            return {**{key: contents[key] for key in keys}, **shown}
    return None


# -- what the processes of a store have counted ----------------------------------------------------


FOLLOW_S = 1.0


def _serve_stats(args: argparse.Namespace) -> int:
    while True:
        document = _counts(args.store)
        header, rows = count_rows(document)
        if args.json:
            emit(document, indent=None if args.follow else 1)
        else:
            say(table([name.upper() for name in header], rows, right=" ".join(header[1:]).upper()))
        if not args.follow:
            return codes.YES
        flush()
        time.sleep(FOLLOW_S)


def _counts(path: str) -> dict[str, Any]:
    """In all, and by identity."""
    found = counts(path)
    total = {name: sum(each[name] for each in found.values()) for name in COUNTED}
    return {"store": path, **total, "identities": found}


# -- what the traces say -------------------------------------------------------------------


def _saves(saves: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saves, all ranks of each together, in the order of their calls."""
    groups: dict[tuple[Any, int], list[dict[str, Any]]] = {}
    seen: dict[tuple[Any, Any], int] = {}
    for each in sorted(saves, key=lambda each: each["begin"]):
        rank_and_step = each["rank"], each.get("step")
        again = seen[rank_and_step] = seen.get(rank_and_step, -1) + 1
        groups.setdefault((each.get("step"), again), []).append(each)
    return [_save(parts) for parts in groups.values()]


def _save(parts: list[dict[str, Any]]) -> dict[str, Any]:
    nbytes = sum(_number(each, "written_bytes") for each in parts)
    committed_s = max(_number(each, "committed_s") for each in parts)
    failed = any(each["event"] == "failed save" for each in parts)
    return {
        "step": int(_number(parts[0], "step")),
        "failed": failed,
        "ranks": len(parts),
        "begin_us": min(each["begin"] for each in parts),
        "end_us": max(each["end"] for each in parts),
        "written_bytes": int(nbytes),
        **{name: max(_number(each, name) for each in parts)
           for name in ("blocked_s", "gate_s", "staged_s", "written_s")},
        "committed_s": None if failed else committed_s,
        "bytes_per_s": None if failed else _rate(nbytes, committed_s),
    }  # fmt: skip


def _restore(facts: dict[str, Any]) -> dict[str, Any]:
    nbytes, seconds = _number(facts, "read_bytes"), _number(facts, "seconds")
    return {
        "step": facts["step"],
        "rank": facts["rank"],
        "begin_us": facts["begin"],
        "end_us": facts["end"],
        "read_bytes": int(nbytes),
        "seconds": seconds,
        "passed_over": int(_number(facts, "passed_over")),
        "bytes_per_s": _rate(nbytes, seconds),
    }


def _copy(facts: dict[str, Any]) -> dict[str, Any]:
    nbytes, seconds = _number(facts, "bytes"), _number(facts, "seconds")
    failed = facts["event"] == "failed copy"
    return {
        "step": facts["step"],
        "rank": facts["rank"],
        "level": str(facts.get("level", "")),
        "failed": failed,
        "begin_us": facts["begin"],
        "end_us": facts["end"],
        "bytes": int(nbytes),
        "linked_bytes": int(_number(facts, "linked_bytes")),
        **{name: _number(facts, name) for name in ("seconds", "read_s", "limited_s")},
        "bytes_per_s": None if failed else _rate(nbytes, seconds),
    }


def _rate(nbytes: float, seconds: float) -> float | None:
    return nbytes / max(seconds, 1e-9) if seconds else None


def _number(facts: dict[str, Any], name: str) -> float:
    """A fact that is a number; 0 if it is not a number, or not known yet."""
    value = facts.get(name)
    return value if isinstance(value, int | float) else 0


# -- what saving costs -----------------------------------------------------------------------------
# Pure. A save counts with its slowest rank, because the other ranks wait for it. A percentile is
# one of the values (nearest rank), so with fewer than a hundred saves the 99th is the longest.


# The times of a save that have percentiles.
TIMES = ("blocked_s", "gate_s", "committed_s")

Save = Mapping[str, Any]


def costs_of(saves: Sequence[Save]) -> dict[str, Any] | None:
    """The figures of saves in the order of their calls; None without a save.

    blocked_share: the time in save() and in the gate, of the time from the call of the first save
    to the call of the last one, whose own cost lies outside; None with fewer than two saves.
    """
    if not saves:
        return None
    begin, end = saves[0]["begin_us"], saves[-1]["begin_us"]
    window_s = max(end - begin, 0) / 1e6
    blocked_s = sum(save["blocked_s"] + save["gate_s"] for save in saves[:-1])
    return {
        "saves": len(saves),
        "failed": sum(save["failed"] for save in saves),
        "window_s": window_s,
        "blocked_share": min(blocked_s / window_s, 1.0) if window_s else None,
        **{name: _spread([save[name] for save in saves if save[name] is not None])
           for name in TIMES},
    }  # fmt: skip


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """The median, the 99th percentile and the largest; None without values."""
    if not values:
        return None
    return {"median": median(values), "p99": percentile(values, 0.99), "max": max(values)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
