"""`statehold tree [DIR]`: the runs below a directory, drawn below the runs that they began from.

Not here: who descends from whom (lineage/family).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any

from statehold.cli import codes
from statehold.cli.output import bad, emit, plain, say, table
from statehold.cli.said import in_words
from statehold.lineage.family import FamilyRun, family
from statehold.reading.places import NotFoundError, directory_of
from statehold.units import format_bytes


def run(args: argparse.Namespace) -> int:
    directory = directory_of(args.directory)
    if not os.path.isdir(directory):
        raise NotFoundError("no such directory", facts={"directory": args.directory})
    members = family(directory)
    if args.json:
        emit({"runs": [_document(each) for each in members]})
    elif members:
        rows = [_row(line, member) for line, member in _drawn(members, directory)]
        header = ("RUN", "FROM", "STEPS", "NEWEST", "OWN", "SHARED", "SAYS")
        say(table(header, rows, right="STEPS NEWEST OWN SHARED"))
    else:
        say("no run")
    return codes.NO if any(each.problem for each in members) else codes.YES


def _drawn(members: Sequence[FamilyRun], directory: str) -> Iterator[tuple[str, FamilyRun]]:
    """Each member with its line, children after their parents."""
    children: dict[str | None, list[FamilyRun]] = {}
    for each in members:
        children.setdefault(each.base, []).append(each)

    def below(base: str | None, indent: str) -> Iterator[tuple[str, FamilyRun]]:
        found = children.get(base, ())
        for index, each in enumerate(found, 1):
            name = plain(os.path.relpath(each.run, directory))
            is_last = index == len(found)
            mark, deeper = ("", "") if base is None else _MARKS[is_last]
            yield f"{indent}{mark}{name}", each
            yield from below(each.run, f"{indent}{deeper}")

    yield from below(None, "")


# Of a child that others follow, and of the last one: its own line, and the lines below it.
_MARKS = {False: ("├── ", "│   "), True: ("└── ", "    ")}


def _row(line: str, member: FamilyRun) -> tuple[object, ...]:
    newest = member.steps[-1] if member.steps else "-"
    words = in_words(member.metrics, member.tags)
    own, shared = member.sizes.own_bytes, member.sizes.shared_bytes
    problem = member.problem and plain(member.problem.partition("\n")[0])  # it must fit a row
    about = bad(f"unreadable: {problem}") if problem else words
    return (
        line, _origin(member), len(member.steps), newest, format_bytes(own), format_bytes(shared),
        about,
    )  # fmt: skip


def _origin(member: FamilyRun) -> str:
    """The step that the run began from, with its run if that is not in the picture."""
    if member.parent is None:
        return ""
    step = f"@{member.parent.step}"
    return step if member.base else f"{plain(member.parent.run)}{step}"


def _document(member: FamilyRun) -> dict[str, Any]:
    parent = member.parent
    return {
        "run": member.run,
        "steps": list(member.steps),
        "parent": parent and {"run": parent.run, "step": parent.step,
                              "manifest_sha256": parent.manifest_sha256},
        "base": member.base,
        "metrics": dict(member.metrics),
        "tags": list(member.tags),
        "own_bytes": member.sizes.own_bytes,
        "shared_bytes": member.sizes.shared_bytes,
        "problem": member.problem,
    }  # fmt: skip
