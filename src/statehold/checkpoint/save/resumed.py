"""The shared files of the step that a job goes on from: its first save links them, too.

Without this, a job that is started again, or a child that has just begun from a step of its parent,
would write all that never changes once more.

The step that wrote such a file is in its header, and in no document. So the header is read, too:
the file is compared with a plan of that step.

Invariants: this only reads. What a file holds is compared with memory by the save that links it
(shared), so a state that was changed since the restore is no danger.
Not here: which of these parts the state has now (sharing), names in the pool (store/pool).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from statehold.checkpoint.levels.copying import is_shared
from statehold.errors import StateholdError
from statehold.format.entries import sums_to_bytes
from statehold.format.saved import PlacedChunk, SavedStep
from statehold.layout.keys import Key

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.store.store import Store


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A shared file of a committed step. keys, begins: of its parts, in file order. sums: of all
    its pieces, as a save has them. header: as it is in the file; nobody has compared it."""

    path: str
    header: bytes
    keys: tuple[Key, ...]
    begins: tuple[int, ...]
    file_bytes: int
    sums: bytes


def known_files(store: Store, step: int, rank: int | None, world: int) -> list[KnownFile]:
    """The shared files that `rank` of `world` ranks (None: the only one) has written of a step.

    Nothing if the step cannot be read, or if another number of ranks has saved it.
    """
    with contextlib.suppress(StateholdError):
        if step in store.steps() and _shares(store, step):
            saved = store.open(step, rank, world)
            if saved.world_size == world:
                return _files(store.fs, saved, store.path(step))
    return []


def _shares(store: Store, step: int) -> bool:
    """Whether any file of the step may be shared. Most steps need no look at their documents."""
    return any(is_shared(name) for name, _ in store.fs.listdir(store.where(step)))


def _files(fs: Fs, saved: SavedStep, directory: str) -> list[KnownFile]:
    held: dict[str, list[tuple[Key, PlacedChunk]]] = {}
    foreign = set()  # files of an optimizer on tiers, whose padding is no tensor of the state
    for name, chunks in saved.own_chunks():
        tensor = saved.tensors.get(name)
        for chunk in chunks:
            if tensor is None:
                foreign.add(chunk.file)
                continue
            key = name, tensor.dtype, chunk.box.shape, chunk.box.offsets
            held.setdefault(chunk.file, []).append((key, chunk))
    headers = {file.name: file.header_sums for file in saved.files}
    return [
        _known(fs, f"{directory}/{name}", headers[name], sorted(found, key=_begin))
        for name, found in held.items()
        if is_shared(name) and name not in foreign
    ]


def _begin(each: tuple[Key, PlacedChunk]) -> int:
    return each[1].begin


def _known(
    fs: Fs, path: str, header_sums: str, found: Sequence[tuple[Key, PlacedChunk]]
) -> KnownFile:
    chunks = [chunk for _, chunk in found]
    return KnownFile(
        path=path,
        header=_header(fs, path, chunks[0].begin),
        keys=tuple(key for key, _ in found),
        begins=tuple(map(attrgetter("begin"), chunks)),
        file_bytes=chunks[0].file_bytes,
        sums=sums_to_bytes("".join((header_sums, *(chunk.sums for chunk in chunks)))),
    )


def _header(fs: Fs, path: str, nbytes: int) -> bytes:
    raw = bytearray(nbytes)
    file = fs.open_read(path)
    try:
        file.read_into(raw, 0)
    finally:
        file.close()
    return bytes(raw)
