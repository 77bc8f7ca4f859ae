"""`statehold fork BASE@STEP CHILD`: a run that begins from a step of another, without a copy.

Not here: how (checkpoint/levels/forking).
"""

from __future__ import annotations

import argparse

from statehold.checkpoint.levels.forking import fork
from statehold.cli import codes
from statehold.cli.output import emit, note, say
from statehold.errors import UsageError
from statehold.options.paths import check_run
from statehold.reading.places import file_system, find
from statehold.units import format_bytes


def run(args: argparse.Namespace) -> int:
    fs = file_system()
    place = find(fs, args.step)
    if place.is_part:
        raise UsageError(
            "other hosts have files of this step, so it cannot be forked here",
            facts={"step": place.directory},
            hint="fork a step at a level that all hosts see",
        )
    forked = fork(fs, place.directory, check_run(args.child))
    if args.json:
        parent = {"run": forked.parent.run, "step": forked.parent.step,
                  "manifest_sha256": forked.parent.manifest_sha256}  # fmt: skip
        emit({"path": forked.path, "parent": parent, "linked_bytes": forked.linked_bytes,
              "copied_bytes": forked.copied_bytes})  # fmt: skip
        return codes.YES
    if forked.copied_bytes:
        copied = format_bytes(forked.copied_bytes)
        note(f"the file system gives no second name there, so {copied} were copied")
    say(forked.path)
    return codes.YES
