"""Files of a run and of its steps: sizes, facts from manifests, leftovers.

Not here: which directory is a run, and which step a name means (reading/places), the contents of a
step (saved), changes of a run (prune).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from statehold._core import Fs
from statehold.checkpoint.levels import remembered
from statehold.cli.said import said
from statehold.errors import CorruptionError, FormatVersionError, StateholdError, StorageError
from statehold.format.manifest import Commit, Manifest
from statehold.reading.places import LEFTOVER, load_manifest
from statehold.reading.sizes import files_below, sizes_of_steps
from statehold.steps.directories import REPLACED
from statehold.steps.pool import POOL_NAME
from statehold.steps.publish import directory_id, look_beside_a_writer
from statehold.steps.shelf import DirectoryShelf
from statehold.steps.whole import check_files

# The names of directories that are not committed steps, for people: by `kind` of leftovers_of().
KINDS = {
    "partial": "being written, or left by a crash",
    "retired": "given up",
    "replaced": "an earlier save of a step, to be deleted",
    "corrupt": "set aside: did not verify",
    "spare": "to be overwritten by the next save",
    "shared": "names of files that the next save may link",
}


def tree_bytes(directory: str) -> tuple[int, int]:
    """(bytes, number) of the files below a directory."""
    found = [each.st_size for each in files_below([directory])]
    return sum(found), len(found)


def is_per_host(run: str) -> bool:
    """Whether each host has this run for itself, with the files of its own ranks."""
    with contextlib.suppress(CorruptionError):
        here = os.path.realpath(run)
        return any(e.per_host and os.path.realpath(e.where) == here for e in remembered.recall(run))
    return False


def describe(store: DirectoryShelf, step: int, *, is_part: bool = False) -> dict[str, Any] | None:
    """The facts of a step from its documents and the sizes of its files; None if it was retired.

    is_part: as for check_files().
    """
    directory = store.where(step)
    found: dict[str, Any] = {"step": step, "path": directory, "state": "committed"}
    found["bytes"], found["files"] = tree_bytes(directory)

    def look() -> Manifest | Commit:
        manifest = load_manifest(store.fs, directory)
        check_files(store.fs, step, directory, is_part=is_part)
        return manifest

    try:
        manifest = look_beside_a_writer(look, lambda: directory_id(directory), directory)
    except (CorruptionError, FormatVersionError, StorageError) as error:
        return {**found, **unreadable(error)}
    if manifest is None:
        has_moved = store.where(step) != directory  # it is being replaced
        return describe(store, step, is_part=is_part) if has_moved else None
    return {**found, **said(manifest)}


def unreadable(error: StateholdError) -> dict[str, Any]:
    """The facts of a step that is damaged, or too new: a person should worry only about damage."""
    newer = isinstance(error, FormatVersionError)
    return {"state": "newer format" if newer else "damaged", "error": str(error)}


def leftovers_of(fs: Fs, run: str) -> list[dict[str, Any]]:
    """The directories in a run that are not committed steps: name, kind and bytes of each.

    bytes: those that its end frees. Leftovers that share a file free more together (bytes_of).
    """
    found = []
    names = [name for name, is_dir in sorted(fs.listdir(run)) if is_dir]
    for name in names:
        match = LEFTOVER.fullmatch(name)
        if match and match[1] == "replaced" and name.removesuffix(REPLACED) not in names:
            continue  # it counts as the step
        if match:
            each = {"name": name, "kind": match[1] or ("shared" if name == POOL_NAME else "spare")}
            found.append({**each, "bytes": bytes_of(run, [each])})
    return found


def bytes_of(run: str, leftovers: Iterable[Mapping[str, Any]]) -> int:
    """The bytes that the end of these leftovers frees, of all together."""
    return sizes_of_steps(run, [f"{run}/{each['name']}" for each in leftovers]).own_bytes
