"""A step elsewhere: `statehold export`, `import`, `copy` and `fork`.

Invariants: torch, which takes seconds to load, is loaded only by an export or an import, and only
if the step, the source and the destination can be what the arguments say. Where torch is missing,
export and import say so before they look at anything else.
Not here: the formats (integrations/formats), how a step is copied (reading/copying), and how a run
begins from one of another (checkpoint/levels/forking).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import warnings
from typing import Any

from statehold.checkpoint.levels.forking import fork as forked_into
from statehold.cli import codes
from statehold.cli.output import ProgressReport, emit, note, say
from statehold.integrations.formats.partial import check_free
from statehold.options.paths import absolute, absolute_outside, check_run
from statehold.reading.copying import copy_step
from statehold.reading.places import check_source, file_system, find, step_in
from statehold.units import format_bytes


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("torch is not installed", name="torch")
    label = "export" if args.is_export else "import"
    with ProgressReport(label) as drawn, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        document = _exported(args, drawn) if args.is_export else _imported(args, drawn)
    return _answered(args, document, *(str(each.message) for each in told))  # what is not held


def _answered(args: argparse.Namespace, document: dict[str, Any], *notes: str) -> int:
    """Print where the result is, after what is to be known about it."""
    if args.json:
        emit(document)
        return codes.YES
    for each in notes:
        note(each)
    say(document["path"])
    return codes.YES


def _exported(args: argparse.Namespace, drawn: ProgressReport) -> dict[str, Any]:
    with contextlib.closing(file_system()) as fs:
        find(fs, args.step)
    check_free(absolute_outside(args.destination, "the destination"))
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


def copy(args: argparse.Namespace) -> int:
    with ProgressReport("copy") as drawn:
        copied = copy_step(args.step, args.destination, link=not args.no_links, report=drawn)
    notes = ["the step was there already"] if copied.was_there else []
    return _answered(args, dataclasses.asdict(copied), *notes)


def fork(args: argparse.Namespace) -> int:
    fs = file_system()
    place = find(fs, args.step)
    forked = forked_into(fs, place.directory, check_run(args.child))
    notes = list[str]()
    if forked.copied_bytes:
        copied = format_bytes(forked.copied_bytes)
        notes.append(f"the file system gives no second name there, so {copied} were copied")
    return _answered(args, dataclasses.asdict(forked), *notes)
