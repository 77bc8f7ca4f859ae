"""`statehold copy RUN[@STEP] DST`: a step in another directory, verified.

Not here: how (checkpoint/levels/step_copies).
"""

from __future__ import annotations

import argparse

from statehold.cli import codes
from statehold.cli.output import Progress, emit, note, say
from statehold.reading.copying import copy_step


def run(args: argparse.Namespace) -> int:
    drawn = _Drawn()
    try:
        copied = copy_step(args.step, args.destination, link=not args.no_links, report=drawn)
    finally:
        drawn.close()
    if args.json:
        emit({"path": copied.path, "linked_bytes": copied.linked_bytes,
              "copied_bytes": copied.copied_bytes, "was_there": copied.was_there})  # fmt: skip
        return codes.YES
    if copied.was_there:
        note("the step was there already")
    say(copied.path)
    return codes.YES


class _Drawn:
    """The progress on stderr, once the number of bytes is known."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = Progress("copy", total)
        self._progress.advance(done - self._done)
        self._done = done

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
