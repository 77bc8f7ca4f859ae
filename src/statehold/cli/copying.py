"""`statehold copy RUN[@STEP] DST`: a step in another directory, verified.

Not here: how (reading/copying).
"""

from __future__ import annotations

import argparse

from statehold.cli import codes
from statehold.cli.output import ProgressReport, emit, note, say
from statehold.reading.copying import copy_step


def run(args: argparse.Namespace) -> int:
    with ProgressReport("copy") as drawn:
        copied = copy_step(args.step, args.destination, link=not args.no_links, report=drawn)
    if args.json:
        emit({"path": copied.path, "linked_bytes": copied.linked_bytes,
              "copied_bytes": copied.copied_bytes, "was_there": copied.was_there})  # fmt: skip
        return codes.YES
    if copied.was_there:
        note("the step was there already")
    say(copied.path)
    return codes.YES
