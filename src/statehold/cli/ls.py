"""`statehold ls RUN`: the steps of a run, and what else lies there.

Holds: reads manifests and the sizes of files, never records or data; a step whose manifest is
damaged is listed as such, and the others all the same.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from statehold.cli import codes
from statehold.cli.output import emit, table
from statehold.cli.places import file_system, leftovers_of, load_manifest, run_of, tree_bytes
from statehold.errors import CorruptionError, FormatVersionError, StorageError
from statehold.steps.manifest import Manifest
from statehold.storage.store import Store
from statehold.units import format_bytes

if TYPE_CHECKING:
    from statehold._core import Fs

# What a step that is not committed is called, for people.
KINDS = {
    "partial": "being written, or left by a crash",
    "retired": "given up",
    "corrupt": "set aside: did not verify",
    "spare": "to be overwritten by the next save",
}


def run(args: argparse.Namespace) -> int:
    fs, path = file_system(), run_of(args.run)
    store = Store(fs, path)
    steps = [describe(fs, store, step) for step in store.steps()]
    document = {"run": path, "steps": steps, "other": leftovers_of(fs, path)}
    if args.json:
        emit(document)
    else:
        _show(document)
    return codes.NO if any(step["state"] == "damaged" for step in steps) else codes.YES


def describe(fs: Fs, store: Store, step: int) -> dict[str, Any]:
    """What is known of a step without reading more than its manifest."""
    directory = store.path(step)
    found: dict[str, Any] = {"step": step, "path": directory, "state": "committed"}
    found["bytes"], found["files"] = tree_bytes(directory)
    try:
        manifest = load_manifest(fs, directory)
    except (CorruptionError, FormatVersionError, StorageError) as error:
        # Not intact, or too new: which of them decides whether a person should worry.
        newer = isinstance(error, FormatVersionError)
        return {**found, "state": "newer format" if newer else "damaged", "error": str(error)}
    return {
        **found,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "version": 1 if isinstance(manifest, Manifest) else 2,
        "writer": manifest.writer,
    }


def _show(document: dict[str, Any]) -> None:
    steps = document["steps"]
    if steps:
        header = ("STEP", "STATE", "CREATED", "RANKS", "FILES", "BYTES", "WRITER")
        print(table(header, map(_row, steps), right="STEP RANKS FILES BYTES"))
    else:
        print("no committed step")
    if document["other"]:
        rows = (
            (each["name"], format_bytes(each["bytes"]), KINDS[each["kind"]])
            for each in document["other"]
        )
        print(f"\n{table(('OTHER', 'BYTES', 'WHAT IT IS'), rows, right='BYTES')}")


def _row(step: dict[str, Any]) -> tuple[object, ...]:
    size = format_bytes(step["bytes"])
    known = [step.get(key, "-") for key in ("created", "world_size", "writer")]
    return step["step"], step["state"], known[0], known[1], step["files"], size, known[2]
