"""Takes files into a step that have other names: D1 and D2 of these files.

The engine writes the file of a rank from memory. State that lies in files already, and files that
steps share, are not read for that: each gets a second name in the partial directory, as a further
file of the rank. Where the file system gives it none (another file system, too many names), it is
copied and verified.

Invariants: when take_in() returns, the bytes of all these files are durable, and D3 makes their
names so. A copy has the bytes that the checksums of the record or the manifest say, or it fails.
Not here: what such a file must be (layout/stored), who has them (tensors/stored).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from statehold.errors import InvariantError
from statehold.format.entries import record_file
from statehold.format.trees import tensors_of
from statehold.layout.plan import BLOCK_BYTES
from statehold.layout.stored import StoredFile, StoredPart, check, held_in
from statehold.steps.copying import DataFile, data_files

if TYPE_CHECKING:
    from statehold.checkpoint.save.handle import Work
    from statehold.observe.background_log import BackgroundLog


def take_in(work: Work, log: BackgroundLog) -> None:
    """Have shared files, and those of stored parts of a state, in its step, durably.

    Sets `work.taken`.
    """
    plan = work.plan.save
    files = [file for stored in work.stored for file in stored.files()]
    shared = work.shared.files()
    names = {held.name for held in work.plan.share.held}
    elsewhere = [held for stored in work.stored for held in stored.elsewhere]
    check(files, plan.rank, names)
    _check_named(work, names.union(held.name for held in [*held_in(files), *elsewhere]))
    given = list[tuple[DataFile, str]]()
    for part, file in enumerate((*shared, *files), 1):
        entry, tensors = record_file(file.placed(plan, part), file.sums)
        chunks = {name: each.chunks for name, each in tensors.items()}
        (source,) = data_files([entry], chunks, BLOCK_BYTES)
        given.append((source, file.path))
    copied = set(work.place.take_in(work.save.step, work.attempt, given, len(shared)))
    work.taken = StoredPart([*shared, *files], [*held_in(files), *elsewhere])
    _account(work, [*shared, *files], copied)
    of_pool = copied.intersection(file.path for file in shared)
    work.shared.refused(of_pool)
    for folder in sorted({os.path.dirname(path) for path in copied - of_pool}):
        log.warn_once(
            "saves copy the files of an optimizer in %s, because the file system of level %s does "
            "not link them: put this Path on the file system of the run, and saves write far less",
            folder, work.place.name,
        )  # fmt: skip


def _check_named(work: Work, names: set[str]) -> None:
    """A tensor that the tree names has to be somewhere, or no reader could open the step."""
    missing = [name for name in tensors_of(work.tree) if name not in names]
    if missing:
        facts = {"tensor": missing[0], "missing": str(len(missing))}
        raise InvariantError("files on storage do not hold a tensor of the state", facts=facts)


def _account(work: Work, files: Sequence[StoredFile], copied: set[str]) -> None:
    copied_bytes = sum(file.file_bytes for file in files if file.path in copied)
    new = copied.union(file.path for file in work.shared.written)
    work.save.record(
        files=1 + len(files),
        linked_bytes=sum(file.file_bytes for file in files if file.path not in new),
        written_bytes=work.plan.save.file_bytes + work.shared.written_bytes + copied_bytes,
    )
