"""`statehold ls RUN [--levels]`: the steps of a run, and its other files, at all levels.

Invariants: reads manifests and the sizes of files, never records or data. A step with a damaged
manifest is listed as such, and does not hide the others.
"""

from __future__ import annotations

import argparse
from typing import Any

from statehold.checkpoint.store.store import Store
from statehold.cli import codes, levels
from statehold.cli.output import emit, plain, table
from statehold.cli.places import describe, leftovers_of, run_at
from statehold.cli.said import in_words
from statehold.reading.places import file_system
from statehold.units import format_bytes

# The names of directories that are not committed steps, for people.
KINDS = {
    "partial": "being written, or left by a crash",
    "retired": "given up",
    "replaced": "an earlier save of a step, to be deleted",
    "corrupt": "set aside: did not verify",
    "spare": "to be overwritten by the next save",
}


def run(args: argparse.Namespace) -> int:
    fs, path = file_system(), run_at(args.run)
    store = Store(fs, path)
    looked_at = (describe(fs, store, step) for step in store.steps())
    steps = [step for step in looked_at if step is not None]
    document = {"run": path, "steps": steps, "other": leftovers_of(fs, path)}
    found = steps
    if args.levels:
        looked = levels.levels_of(fs, path, far=True, options=levels.far_options(args.option))
        document["levels"] = [level.document() for level in looked]
        document["copies"] = found = [
            {"level": level.entry.name, **copy}
            for step in levels.steps_of(looked)
            for level, copy in levels.copies_of(looked, step)
        ]
    if args.json:
        emit(document)
    else:
        _show(document)
    return codes.NO if any(step["state"] == "damaged" for step in found) else codes.YES


def _show(document: dict[str, Any]) -> None:
    steps = document["steps"]
    if steps:
        header = ("STEP", "STATE", "CREATED", "RANKS", "FILES", "BYTES", "WRITER", "SAYS")
        shown = len(header) - (not any(map(_words, steps)))  # most runs say nothing
        rows = ((*_row(step), _words(step))[:shown] for step in steps)
        print(table(header[:shown], rows, right="STEP RANKS FILES BYTES"))
    else:
        print("no committed step")
    if "levels" in document:
        _show_levels(document)
    if document["other"]:
        rows = (
            (each["name"], format_bytes(each["bytes"]), KINDS[each["kind"]])
            for each in document["other"]
        )
        print(f"\n{table(('OTHER', 'BYTES', 'WHAT IT IS'), rows, right='BYTES')}")


def _show_levels(document: dict[str, Any]) -> None:
    header = ("LEVEL", "KIND", "STATE", "STEPS", "NEWEST", "BYTES", "WHERE")
    rows = map(_level_row, document["levels"])
    print(f"\n{table(header, rows, right='STEPS NEWEST BYTES')}")
    copies = [
        (each["step"], each["level"], _state_of(each), format_bytes(each["bytes"]))
        for each in document["copies"]
    ]
    if copies:
        print(f"\n{table(('STEP', 'LEVEL', 'STATE', 'BYTES'), copies, right='STEP BYTES')}")
    for level in document["levels"]:
        if level["error"]:
            print(f"\nlevel {level['name']}: {plain(level['error'])}")


def _state_of(copy: dict[str, Any]) -> str:
    if copy["state"] != "part":
        return str(copy["state"])
    return f"part ({copy['ranks_here']} of {copy['world_size']} ranks here)"


def _level_row(level: dict[str, Any]) -> tuple[object, ...]:
    steps = level["steps"]
    size = format_bytes(level["bytes"])
    newest = steps[-1] if steps else "-"
    about = level["name"], level["kind"], level["state"]
    return *about, len(steps), newest, size, level["path"]


def _row(step: dict[str, Any]) -> tuple[object, ...]:
    size = format_bytes(step["bytes"])
    known = [step.get(key, "-") for key in ("created", "world_size", "writer")]
    return step["step"], step["state"], known[0], known[1], step["files"], size, known[2]


def _words(step: dict[str, Any]) -> str:
    return in_words(step.get("metrics", {}), step.get("tags", ()))
