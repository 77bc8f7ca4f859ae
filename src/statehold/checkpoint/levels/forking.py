"""A run that begins from a step of another run, without a copy of it.

    1. The child gets a second name for each data file of the step (or a copy, where the file system
       gives none), and a copy of each document.
    2. Its manifest says where the step comes from: run, step, and the sha256 of the manifest there.
    3. The child's own commit (D3 to D7) publishes the step.

Invariants: the base is only read, and its job may go on. A run that is deleted, moved or pruned
takes nothing away from the other: a file with several names is never written again (S1).
The step was still at its place when all names were made. So no job had begun to take its files for
another step before.
Not here: what a name such as RUN@STEP means (reading/places), how later steps of the child carry
their descent on (save/publishing).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from statehold.errors import StepNotFoundError, StorageError, UsageError, no_such_step
from statehold.format.entries import DOCUMENT_BYTES_MAX, Origin, check_origin, sha256
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from statehold.steps.copying import CopyPart, DataFile, part_of
from statehold.steps.directories import misnamed
from statehold.steps.owners import begin_run
from statehold.steps.shelf import DirectoryShelf, StepShelf
from statehold.steps.store import Store
from statehold.steps.target import DirectoryPlace, opened
from statehold.steps.whole import newest_whole
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.levels.levels import Levels

_BUFFER_BYTES = 4 * MiB


@dataclass(frozen=True, slots=True)
class Forked:
    """path: the step in the child. parent: what its manifest says. linked_bytes: of data files with
    a second name; copied_bytes: of those that the file system gave none."""

    path: str
    parent: Origin
    linked_bytes: int
    copied_bytes: int


def fork(fs: Fs, directory: str, child: str, run: str | None = None) -> Forked:
    """Make the step in `directory` the first step of the run directory `child`.

    directory: of a committed step, as its store has it. run: that of the child, if `child` is only
    its first level. Raises UsageError if the child has steps,
    or if no step can record the path of the base; RunBusyError if a job uses the child; and
    StepNotFoundError if the step is retired meanwhile. What reading the step and writing into the
    child raise passes through. After any of these the child has no step.
    """
    where = directory.rstrip("/")
    base = os.path.dirname(where)
    check_origin(base)
    shelf = StepShelf(fs, where)
    part = part_of(shelf, shelf.step, lambda saved, _: range(saved))
    manifest = Manifest.decode(part.manifest, f"{where}/{MANIFEST_NAME}")
    origin = Origin(base, manifest.step, sha256(part.manifest))
    with _opened(fs, child, base, manifest.step, part.manifest) as place:
        begin_run(place.store, run or child)
        copied = _take(place, part, manifest.step, where)
        check_standing(fs, where, part.manifest)
        about = replace(manifest.about, parent=origin)
        place.store.commit(manifest.step, replace(manifest, about=about).encode())
        path = place.store.path(manifest.step)
    total, copied_bytes = part.nbytes, sum(file.bytes for file in copied)
    return Forked(path, origin, total - copied_bytes, copied_bytes)


def fork_into(levels: Levels, run: str, step: int | None) -> Forked:
    """Begin an open run, which has no step, with a step of another (None: its newest).

    The leading rank calls this before its first save. Raises as fork() does.
    """
    first = levels.near[0]
    if first.is_apart:
        raise UsageError(
            "a run whose first level is one of each host cannot begin from a parent",
            facts={"level": first.name, "parent": run},
            hint="run `statehold fork` into a level that all hosts see, and restore from there",
        )
    base = DirectoryShelf(first.store.fs, run)
    newest = newest_whole(base) if step is None else max(base.steps(), default=None)
    if newest is None:
        is_there = base.fs.is_dir(base.root)
        raise StepNotFoundError(
            "the parent of this run has no committed step",
            facts={"parent": run, "found": "no step" if is_there else "no such directory"},
            hint=misnamed(base.fs, run)
            or "if it was moved, give its new path: `statehold tree DIR` lists the runs in DIR",
        )
    step = newest if step is None else step
    if step not in (steps := base.steps()):
        raise no_such_step(step, run, steps)
    return fork(base.fs, base.where(step), first.store.root, levels.run)


def _take(place: DirectoryPlace, part: CopyPart, step: int, where: str) -> list[DataFile]:
    """Have the step in the child, except for its manifest; the files that were copied."""
    place.store.begin(step)
    files = {f"{where}/{file.name}": file for file in part.files}
    given = [(file, path) for path, file in files.items()]
    copied = place.take_in(step, None, given, durable=len(given))
    for name, raw in part.records:
        place.store.seal(step, None, name, raw)
    return [files[path] for path in copied]


def check_standing(fs: Fs, where: str, manifest: bytes) -> None:
    """Raise StepNotFoundError if the step is not at its place any more.

    A job that retires a step renames its directory before it uses a file again."""
    path = f"{where}/{MANIFEST_NAME}"
    with contextlib.suppress(StorageError):
        if fs.read_file(path, DOCUMENT_BYTES_MAX) == manifest:
            return
    facts = {"step": where}
    raise StepNotFoundError(
        "the step was retired, or saved again, while it was copied", facts=facts
    )


@contextlib.contextmanager
def _opened(fs: Fs, child: str, base: str, step: int, manifest: bytes) -> Iterator[DirectoryPlace]:
    """The child, locked. After an error it has no part of the step."""
    store = Store(fs, child, reuse=False)
    if store.root == base:
        raise UsageError("a run cannot begin from a step of its own", facts={"run": child})
    with opened(store, child, "child", _BUFFER_BYTES, manifest) as place:
        if steps := store.steps():
            facts = {"run": child, "newest step": steps[-1]}
            raise UsageError("a run that begins from a step must have no step yet", facts=facts)
        try:
            yield place
        except BaseException:
            store.abandon(step)
            raise
