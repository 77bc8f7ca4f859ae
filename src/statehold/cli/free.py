"""`statehold free RUN`: give back the memory that the memory levels of a run take on this host.

Invariants: nothing changes without --yes; with it the memory is locked before anything is looked
at. Without --force, nothing is freed that an agent uses, and no step that is newer than all steps
elsewhere: that would go back in training. Another save of a step is another step, as its manifest
shows. A job is never disturbed. An object store that was not asked counts as one without steps. A
file counts once, and not at all if it has a name elsewhere: then it is not freed.
Not here: which directories are memory, how they are freed (checkpoint/levels/freeing).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from statehold._core import Fs
from statehold.checkpoint.levels.freeing import free, memory_of
from statehold.cli import codes, levels
from statehold.cli.output import emit, plain, say, table
from statehold.errors import StateholdError, UsageError
from statehold.format.entries import sha256
from statehold.reading.places import NotFoundError, directory_of, file_system
from statehold.reading.sizes import sizes
from statehold.steps.lock import RunLock, is_saved_into
from statehold.steps.shelf import DirectoryShelf, Shelf
from statehold.steps.whole import is_whole
from statehold.units import format_bytes


def run(args: argparse.Namespace) -> int:
    fs, path = file_system(), directory_of(args.run)
    memory = memory_of(path)
    if not (memory or os.path.isdir(path)):
        hint = "statehold doctor says which memory is in use on this host"
        raise NotFoundError("no such run, and no memory of one", facts={"run": path}, hint=hint)
    with contextlib.ExitStack() as locks:
        for each in memory if args.yes else ():
            locks.callback(RunLock(each, passes=not args.force).release)
        document = _looked_at(fs, path, memory, args)
        if args.yes and document["newer"] and not args.force:
            raise _refusal(document)
        for each in memory if args.yes else ():
            free(fs, each)
    document["done"] = args.yes
    emit(document) if args.json else _show(document)
    return codes.YES


def _looked_at(
    fs: Fs, path: str, memory: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        {"path": each, "steps": DirectoryShelf(fs, each).steps(), "bytes": sizes([each]).own_bytes,
         "used": not args.yes and is_saved_into(each)}
        for each in memory
    ]  # fmt: skip
    looked, there = [], list[tuple[Shelf, list[int]]]()
    if os.path.isdir(path) and path not in memory:
        options, run = levels.far_options(args.option), DirectoryShelf(fs, path)
        looked = levels.levels_of(fs, path, far=args.levels, options=options)
        there.append((run, [n for n in run.steps() if is_whole(run, n, newer=False)]))
    others = [level for level in looked if level.entry.where not in memory]
    there += [(level.place, level.readable) for level in others if level.place is not None]
    here = [(DirectoryShelf(fs, each["path"]), each["steps"]) for each in found]
    only_here = {step for step, _ in _saves(here) - _saves(there)}
    newest = max((step for _, steps in there for step in steps), default=0)
    return {
        "run": path,
        "memory": found,
        "only_here": sorted(only_here),
        "newer": sorted(step for step in only_here if step >= newest),
        "not_asked": [level.entry.name for level in others if level.state == "not asked"],
        "bytes": sizes(memory).own_bytes,
    }


def _saves(places: Iterable[tuple[Shelf, Sequence[int]]]) -> set[tuple[int, str]]:
    """The saves of steps in these places, by their manifests. Nobody misses one without."""
    found = set()
    for shelf, steps in places:
        for step in steps:
            with contextlib.suppress(StateholdError):
                found.add((step, sha256(shelf.manifest(step))))
    return found


def _refusal(document: dict[str, Any]) -> UsageError:
    hint = "copy a step: statehold copy MEMORY@STEP DST. To lose them, pass --force"
    if document["not_asked"]:
        hint = f"--levels asks {', '.join(document['not_asked'])}, too. {hint}"
    facts = {"steps": ", ".join(map(str, document["newer"])),
             "memory": ", ".join(each["path"] for each in document["memory"])}  # fmt: skip
    return UsageError("these steps are newer than all steps elsewhere", facts=facts, hint=hint)


def _show(document: dict[str, Any]) -> None:
    rows = [
        (plain(each["path"]), ", ".join(map(str, each["steps"])) or "none",
         format_bytes(each["bytes"]), "yes" if each["used"] else "no")
        for each in document["memory"]
    ]  # fmt: skip
    if not rows:
        say("this run has no memory on this host")
        return
    say(table(("MEMORY", "STEPS", "BYTES", "IN USE"), rows, right="BYTES"))
    size = format_bytes(document["bytes"])
    if document["done"]:
        say(f"{size} freed")
        return
    if document["only_here"]:
        say(f"nowhere else: {', '.join(map(str, document['only_here']))}")
    say(f"{size}; nothing was changed; pass --yes to free it")
