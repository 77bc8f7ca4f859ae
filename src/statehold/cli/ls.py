"""`statehold ls RUN [--levels]`: the steps of a run, and its other files, at all levels.

Invariants: reads documents and the sizes of files, never data. A step with a damaged document, or
without a file, or with one that is cut, is listed as damaged, and does not hide the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from statehold.cli import codes, levels
from statehold.cli.output import (
    age,
    bad,
    emit,
    good,
    is_window,
    note,
    sections,
    table,
    to_the_second,
    told,
    weak,
)
from statehold.cli.places import KINDS, describe, is_per_host, leftovers_of
from statehold.cli.said import LEAST, LEGEND, MOST, columns_of
from statehold.cli.tables import Table
from statehold.reading.places import file_system, run_at
from statehold.steps.directories import misnamed
from statehold.steps.shelf import DirectoryShelf
from statehold.units import format_bytes


def run(args: argparse.Namespace) -> int:
    fs, path = file_system(), run_at(args.run)
    store = DirectoryShelf(fs, path)
    is_part = is_per_host(path)
    looked_at = (describe(store, step, is_part=is_part) for step in store.steps())
    steps = [step for step in looked_at if step is not None]
    document = {"run": path, "steps": steps, "other": leftovers_of(fs, path)}
    found, states = steps, []
    if args.levels:
        looked = levels.levels_of(fs, path, far=True, options=levels.far_options(args.option))
        document["levels"] = [level.document() for level in looked]
        states = [level.state for level in looked]
        document["copies"] = found = [
            {"level": level.entry.name, **copy}
            for step in levels.steps_of(looked)
            for level, copy in levels.copies_of(looked, step)
        ]
    if args.json:
        emit(document)
    else:
        _show(document)
        if text := misnamed(fs, path):
            note(text)
    is_damaged = any(step["state"] == "damaged" for step in found)
    return codes.code_at_levels(states, is_damaged=is_damaged)


def _show(document: dict[str, Any]) -> None:
    steps = document["steps"]
    parts = [_steps_table(steps) if steps else "no committed step"]
    if "levels" in document:
        parts += _levels_parts(document)
    if document["other"]:
        rows = (
            (each["name"], format_bytes(each["bytes"]), KINDS[each["kind"]])
            for each in document["other"]
        )
        header = ("OTHER", "BYTES", "WHAT IT IS")
        parts.append(table(header, rows, right="BYTES", prose="WHAT IT IS"))
    sections(*parts)


def _steps_table(steps: list[dict[str, Any]]) -> Table:
    """A column is a name and its cell for a step."""
    said_here = columns_of(steps)
    columns: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
        ("STEP", lambda step: step["step"]),
        ("STATE", state_of),
        *said_here,  # before what a narrow window cuts off
        *(_TIMES_IN_A_WINDOW if is_window() else _TIMES).items(),
        ("RANKS", lambda step: step.get("world_size", "-")),
        ("FILES", lambda step: step["files"]),
        ("BYTES", lambda step: format_bytes(step["bytes"])),
        ("WRITER", lambda step: step.get("writer", "-")),
    ]
    header = [name for name, _ in columns]
    rows = [[cell(step) for _, cell in columns] for step in steps]
    fixed = ("STATE", *(name for name, _ in said_here), *_TIMES_IN_A_WINDOW)
    marked = any(str(cell)[-1:] in (LEAST, MOST) for row in rows for cell in row)
    foot = LEGEND if marked else ""
    return table(header, rows, right="STEP AGE RANKS FILES BYTES", fixed=fixed, foot=foot)


_TIMES: dict[str, Callable[[dict[str, Any]], object]] = {
    "CREATED": lambda step: step.get("created", "-")
}
_TIMES_IN_A_WINDOW: dict[str, Callable[[dict[str, Any]], object]] = {
    "CREATED (UTC)": lambda step: to_the_second(step.get("created", "-")),
    "AGE": lambda step: age(step.get("created", "")).removesuffix(" ago") or "-",
}


def _levels_parts(document: dict[str, Any]) -> Iterator[str | Table]:
    header = ("LEVEL", "KIND", "STATE", "STEPS", "NEWEST", "BYTES", "WHERE")
    yield table(header, map(_level_row, document["levels"]), right="STEPS NEWEST BYTES")
    copies = [
        (each["step"], each["level"], state_of(each), format_bytes(each["bytes"]))
        for each in document["copies"]
    ]
    if copies:
        yield table(("STEP", "LEVEL", "STATE", "BYTES"), copies, right="STEP BYTES")
    for level in document["levels"]:
        if level["error"]:
            yield f"level {level['name']}: {told(level['error'])}"


def state_of(step: dict[str, Any]) -> str:
    """The state of a step or of a copy, in its colour."""
    state = str(step["state"])
    if state == "part":
        return weak(f"part ({step['ranks_here']} of {step['world_size']} ranks here)")
    return {"committed": good, "damaged": bad}.get(state, weak)(state)


def _level_row(level: dict[str, Any]) -> tuple[object, ...]:
    steps = level["steps"]
    size = format_bytes(level["bytes"])
    newest = steps[-1] if steps else "-"
    colour = {"there": good, "unreadable": bad}.get(level["state"], weak)
    about = level["name"], level["kind"], colour(level["state"])
    return *about, len(steps), newest, size, level["path"]
