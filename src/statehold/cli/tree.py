"""Several runs, and what they share: `statehold tree [DIR]`, `catalog DIR` and `du RUN`.

Own bytes are freed when the step or the run is deleted. Shared ones belong to others, too.
Not here: who descends from whom (lineage/family), what is in a catalogue (lineage/catalog) and who
asks it (lineage/relatives), how bytes are counted (reading/sizes).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from statehold.cli import codes
from statehold.cli.output import bad, emit, note, plain, say, table
from statehold.cli.said import in_words
from statehold.lineage.catalog import Catalog
from statehold.lineage.family import FamilyRun, family
from statehold.reading.places import NotFoundError, directory_of, file_system, run_at
from statehold.reading.sizes import StepSizes, sizes, sizes_of_steps
from statehold.steps.shelf import DirectoryShelf
from statehold.units import format_bytes


def _directory(args: argparse.Namespace) -> str:
    directory = directory_of(args.directory)
    if not os.path.isdir(directory):
        raise NotFoundError("no such directory", facts={"directory": args.directory})
    return directory


# -- tree ------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    directory = _directory(args)
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


# -- catalog ---------------------------------------------------------------------------------------


def catalog(args: argparse.Namespace) -> int:
    _directory(args)
    found_in = Catalog(args.directory, args.file)
    found = found_in.rebuild() if args.rebuild else found_in.scan()
    if args.json:
        emit({"file": found_in.file, **asdict(found)})
    else:
        say(
            f"{found.steps} steps of {found.runs} runs, with {found.graphs} different graphs; "
            f"{found.read} manifests read, {found.gone} steps gone"
        )
        for each in found.unreadable:
            note(f"unreadable: {each}")
    return codes.NO if found.unreadable else codes.YES


# -- du --------------------------------------------------------------------------------------------


def du(args: argparse.Namespace) -> int:
    path = run_at(args.run)
    store = DirectoryShelf(file_system(), path)
    steps = {step: sizes_of_steps(path, [store.where(step)]) for step in store.steps()}
    whole = sizes([path])
    if args.json:
        listed = [{"step": step, **_sizes(found)} for step, found in steps.items()]
        emit({"run": path, "steps": listed, **_sizes(whole)})
        return codes.YES
    rows = [(step, *_texts(found)) for step, found in steps.items()]
    header = ("STEP", "BYTES", "OWN", "SHARED")
    say(table(header, [*rows, ("run", *_texts(whole))], right=" ".join(header)))
    return codes.YES


def _sizes(found: StepSizes) -> dict[str, int]:
    return {"bytes": found.bytes, "own_bytes": found.own_bytes, "shared_bytes": found.shared_bytes}


def _texts(found: StepSizes) -> tuple[str, ...]:
    return tuple(map(format_bytes, _sizes(found).values()))
