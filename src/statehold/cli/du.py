"""`statehold du RUN`: what each step takes on storage, and what it shares.

Own bytes are freed when the step is deleted. Shared ones belong to other steps or runs, too.
Not here: how they are counted (reading/sizes).
"""

from __future__ import annotations

import argparse

from statehold.cli import codes
from statehold.cli.output import emit, say, table
from statehold.reading.places import file_system, run_at
from statehold.reading.sizes import StepSizes, sizes, sizes_of_steps
from statehold.steps.shelf import DirectoryShelf
from statehold.units import format_bytes


def run(args: argparse.Namespace) -> int:
    path = run_at(args.run)
    store = DirectoryShelf(file_system(), path)
    steps = {step: sizes_of_steps(path, [store.where(step)]) for step in store.steps()}
    whole = sizes([path])
    if args.json:
        listed = [{"step": step, **_document(found)} for step, found in steps.items()]
        emit({"run": path, "steps": listed, **_document(whole)})
        return codes.YES
    rows = [(step, *_texts(found)) for step, found in steps.items()]
    header = ("STEP", "BYTES", "OWN", "SHARED")
    say(table(header, [*rows, ("run", *_texts(whole))], right=" ".join(header)))
    return codes.YES


def _document(found: StepSizes) -> dict[str, int]:
    return {"bytes": found.bytes, "own_bytes": found.own_bytes, "shared_bytes": found.shared_bytes}


def _texts(found: StepSizes) -> tuple[str, ...]:
    return tuple(map(format_bytes, _document(found).values()))
