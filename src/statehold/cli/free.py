"""`statehold free RUN`: give back the memory that the memory levels of a run take on this host.

Invariants: nothing changes without --yes. Without --force, nothing is freed that a job or an agent
uses, and no step that is newer than all steps elsewhere: that would go back in training. A job is
never disturbed. An object store that was not asked counts as one without steps. A file counts once,
and not at all if it has a name elsewhere: then it is not freed.
Not here: which directories are memory, how they are freed (checkpoint/levels/freeing).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.levels.freeing import free, memory_of
from statehold.cli import codes, levels
from statehold.cli.output import emit, plain, say, table
from statehold.errors import RunBusyError, UsageError
from statehold.reading.places import NotFoundError, directory_of, file_system
from statehold.reading.sizes import sizes
from statehold.steps.lock import is_saved_into
from statehold.steps.shelf import DirectoryShelf
from statehold.steps.whole import whole_steps
from statehold.units import format_bytes

if TYPE_CHECKING:
    from statehold._core import Fs


def run(args: argparse.Namespace) -> int:
    fs, path = file_system(), directory_of(args.run)
    memory = memory_of(path)
    if not (memory or os.path.isdir(path)):
        hint = "statehold doctor says which memory is in use on this host"
        raise NotFoundError("no such run, and no memory of one", facts={"run": path}, hint=hint)
    document = _looked_at(fs, path, memory, args)
    if args.yes:
        _check_free(document, force=args.force)
        for each in memory:
            free(fs, each)
    document["done"] = args.yes
    emit(document) if args.json else _show(document)
    return codes.YES


def _looked_at(
    fs: Fs, path: str, memory: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        {"path": each, "steps": DirectoryShelf(fs, each).steps(), "bytes": sizes([each]).own_bytes,
         "used": is_saved_into(each)}
        for each in memory
    ]  # fmt: skip
    looked, in_run = [], list[int]()
    if os.path.isdir(path) and path not in memory:
        options, in_run = levels.far_options(args.option), whole_steps(DirectoryShelf(fs, path))
        looked = levels.levels_of(fs, path, far=args.levels, options=options)
    others = [level for level in looked if level.entry.where not in memory]
    elsewhere = {*levels.steps_of(others, counting=True), *in_run}
    only_here = {step for each in found for step in each["steps"]} - elsewhere
    return {
        "run": path,
        "memory": found,
        "only_here": sorted(only_here),
        "newer": sorted(step for step in only_here if step > max(elsewhere, default=-1)),
        "not_asked": [level.entry.name for level in others if level.state == "not asked"],
        "bytes": sizes(memory).own_bytes,
    }


def _check_free(document: dict[str, Any], *, force: bool) -> None:
    """Raise if the memory is needed. force: neither an agent nor a step that is nowhere else
    counts."""
    if force:
        return
    used = [each["path"] for each in document["memory"] if each["used"]]
    if used:
        raise RunBusyError(
            "a job or an agent uses the memory of this run",
            facts={"memory": ", ".join(used)},
            hint="wait until it has ended. --force takes memory from an agent, but not from a job",
        )
    if document["newer"]:
        steps = ", ".join(map(str, document["newer"]))
        hint = "copy a step: statehold copy MEMORY@STEP DST. To lose them, pass --force"
        if document["not_asked"]:
            hint = f"--levels asks {', '.join(document['not_asked'])}, too. {hint}"
        facts = {"steps": steps, "memory": ", ".join(each["path"] for each in document["memory"])}
        raise UsageError("these steps are newer than all steps elsewhere", facts=facts, hint=hint)


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
