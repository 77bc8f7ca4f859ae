"""`statehold export RUN[@STEP] DST --to FORMAT` and `statehold import SRC RUN@STEP`.

Not here: the formats (integrations/formats).
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from statehold.cli import codes
from statehold.cli.output import ProgressReport, emit, note, say
from statehold.integrations.formats.convert import export_step, import_step

_SHOWN = 5


def run(args: argparse.Namespace) -> int:
    label = "export" if args.is_export else "import"
    with ProgressReport(label) as drawn, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the names are in the answer
        document = _exported(args, drawn) if args.is_export else _imported(args, drawn)
    if args.json:
        emit(document)
        return codes.YES
    if left_out := document.get("left_out"):
        names = ", ".join(left_out[:_SHOWN])
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        note(f"{document['to']} does not hold these as they were: {names}{more}")
    say(document["path"])
    return codes.YES


def _exported(args: argparse.Namespace, drawn: ProgressReport) -> dict[str, Any]:
    left_out = export_step(
        args.step, args.destination, args.to, name=args.name, config=args.config, report=drawn
    )
    if args.to == "hf" and args.config is None:
        note("without a config.json, from_pretrained() needs config=; --config DIR copies one")
    return {"path": args.destination, "to": args.to, "left_out": list(left_out)}


def _imported(args: argparse.Namespace, drawn: ProgressReport) -> dict[str, Any]:
    path = import_step(args.source, args.step, name=args.name, skip=args.skip, report=drawn)
    return {"path": path}
