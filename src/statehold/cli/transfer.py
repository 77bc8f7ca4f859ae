"""`statehold export RUN[@STEP] DST --to FORMAT` and `statehold import SRC RUN@STEP`.

Invariants: torch, which takes seconds to load, is loaded only if the step, the source and the
destination can be what the arguments say.
Not here: the formats (integrations/formats).
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from typing import Any

from statehold.cli import codes
from statehold.cli.output import ProgressReport, emit, note, say
from statehold.integrations.formats.partial import check_free
from statehold.options.paths import absolute
from statehold.reading.places import check_source, file_system, find, step_in


def run(args: argparse.Namespace) -> int:
    label = "export" if args.is_export else "import"
    with ProgressReport(label) as drawn, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        document = _exported(args, drawn) if args.is_export else _imported(args, drawn)
    if args.json:
        emit(document)
        return codes.YES
    for each in told:  # of what the format does not hold
        note(str(each.message))
    say(document["path"])
    return codes.YES


def _exported(args: argparse.Namespace, drawn: ProgressReport) -> dict[str, Any]:
    with contextlib.closing(file_system()) as fs:
        find(fs, args.step)
    check_free(absolute(args.destination, "the destination"))
    from statehold.integrations.formats.convert import export_step

    left_out = export_step(
        args.step, args.destination, args.to, name=args.name, config=args.config, report=drawn
    )
    if args.to == "hf" and args.config is None:
        note("without a config.json, from_pretrained() needs config=; --config DIR copies one")
    return {"path": args.destination, "to": args.to, "left_out": list(left_out)}


def _imported(args: argparse.Namespace, drawn: ProgressReport) -> dict[str, Any]:
    step_in(args.step)
    check_source(absolute(args.source, "the source"))
    from statehold.integrations.formats.convert import import_step

    path = import_step(args.source, args.step, name=args.name, skip=args.skip, report=drawn)
    return {"path": path}
