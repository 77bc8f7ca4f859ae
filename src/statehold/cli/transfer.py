"""`statehold export RUN[@STEP] DST --to FORMAT` and `statehold import SRC RUN@STEP`.

Not here: the formats (integrations/formats).
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from statehold.cli import codes
from statehold.cli.output import Progress, emit, note, say
from statehold.integrations.formats.convert import export_step, import_step


def run(args: argparse.Namespace) -> int:
    drawn = _Drawn("export" if args.is_export else "import")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the names are in the answer
            document = _exported(args, drawn) if args.is_export else _imported(args, drawn)
    finally:
        drawn.close()
    if args.json:
        emit(document)
        return codes.YES
    for name in document.get("left_out", ()):
        note(f"{document['to']} does not hold this as it was: {name}")
    say(document["path"])
    return codes.YES


def _exported(args: argparse.Namespace, drawn: _Drawn) -> dict[str, Any]:
    left_out = export_step(args.step, args.destination, args.to, name=args.name, report=drawn)
    return {"path": args.destination, "to": args.to, "left_out": list(left_out)}


def _imported(args: argparse.Namespace, drawn: _Drawn) -> dict[str, Any]:
    path = import_step(args.source, args.step, name=args.name, report=drawn)
    return {"path": path}


class _Drawn:
    """The progress on stderr, once the number of bytes is known."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._progress: Progress | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = Progress(self._label, total)
        self._progress.advance(done - self._done)
        self._done = done

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
