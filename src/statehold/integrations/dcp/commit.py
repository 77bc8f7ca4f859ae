"""Records and a manifest, which make a directory of the ranks' files a step.

Owns: the description of boxes that a planner chose freely, and the tree of the step.
Invariants: a step of one rank whose tensors are whole is version 1, as a Checkpointer writes it.
Any other step is version 2. Rank 0's record has the whole tree and, for every tensor, the rank of
each box. The other records have their own chunks.
Not here: the data (writing), the renames (publish).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.save.writes import WRITER, now
from statehold.errors import CorruptionError, InvariantError, StorageError, UsageError
from statehold.format.entries import TensorEntry, sha256
from statehold.format.manifest import Commit, Manifest, RecordEntry, groups_of, record_name
from statehold.format.record import Record
from statehold.format.saved import open_step
from statehold.format.trees import tensors_of
from statehold.integrations.dcp.tree import Path, nest
from statehold.integrations.dcp.writing import SaveDestination, Written, WrittenBox
from statehold.layout.layout import Box, ExplicitLayout
from statehold.layout.plan import BLOCK_BYTES
from statehold.layout.share import HeldTensor
from statehold.steps.directories import parent_of
from statehold.steps.publish import make_durable
from statehold.tensors.nodes import value_of

if TYPE_CHECKING:
    from statehold._core import Fs

Placed = tuple[WrittenBox, int]  # and the rank that wrote it


@dataclass(frozen=True, slots=True)
class Sent:
    """The message of one rank to the committer: its record, or its files if it is rank 0."""

    place: SaveDestination
    pieces: tuple[WrittenBox, ...]
    values: dict[str, Any]
    entry: RecordEntry | None
    digests: Mapping[str, str]
    own: Written | None


def hand_over(
    fs: Fs, place: SaveDestination, written: Written, paths: Mapping[str, Path] | None = None
) -> Sent:
    """Leave the record of this rank next to its files (D4), unless it is rank 0, which writes its
    last.

    With `paths` a rank has a tree of its own, because the ranks did not share out the saving.
    """
    if place.rank == 0:
        return Sent(place, written.pieces, written.values, None, {}, written)
    local = [piece for piece in written.pieces if piece.local]
    state = {} if paths is None else tree(local, written.values, paths)
    record = _record(place, written, state, [(piece, place.rank) for piece in written.pieces])
    entry = _leave(fs, place, record)
    return Sent(place, written.pieces, written.values, entry, record.group_digests(), None)


def complete(
    fs: Fs, sents: Sequence[Sent], paths: Mapping[str, Path], *, alone: bool = False
) -> bytes:
    """The manifest of the files of all ranks, by rank."""
    place, own = sents[0].place, sents[0].own
    if own is None:
        raise InvariantError("the first rank of a save is not the one that commits")
    placed = [
        (piece, sent.place.rank)
        for sent in sents
        for piece in sent.pieces
        if sent.place.rank == 0 or not piece.local
    ]
    values = own.values
    if not alone:
        values = {name: node for sent in sents for name, node in sent.values.items()}
    state = tree((piece for piece, _ in placed), values, paths)
    if _is_simple(place, own):
        return _manifest(place, own, state).encode(value_of=value_of)
    record = _record(place, own, state, placed)
    entries = [_leave(fs, place, record), *(sent.entry for sent in sents[1:] if sent.entry)]
    digests = [record.group_digests(), *(sent.digests for sent in sents[1:])]
    return Commit(
        step=place.step,
        world_size=place.world_size,
        created=now(),
        writer=WRITER,
        attempt=place.attempt,
        records=tuple(entries),
        state=groups_of(digests),
    ).encode()


def is_published(fs: Fs, place: SaveDestination) -> bool:
    """Whether the checkpoint of several ranks is the one at its final place; if so, D7 is done."""
    try:
        found = open_step(fs.read_file, place.final, place.step, place.rank, place.world_size)
    except (CorruptionError, StorageError):
        return False
    is_ours = found.attempt == place.attempt
    if is_ours:
        make_durable(fs, parent_of(place.final))
    return is_ours


def _is_simple(place: SaveDestination, written: Written) -> bool:
    """Whether version 1 can hold the step."""
    is_whole = all(piece.box == Box.whole(piece.shape) for piece in written.pieces)
    return place.world_size == 1 and len(written.files) == 1 and is_whole


def _manifest(place: SaveDestination, written: Written, state: Any) -> Manifest:
    """The manifest of a step of one rank."""
    pieces = {piece.name: piece for piece in written.pieces}
    return Manifest(
        step=place.step,
        world_size=1,
        created=now(),
        writer=WRITER,
        block_bytes=BLOCK_BYTES,
        files=written.files,
        tensors={
            name: TensorEntry(pieces[name].dtype, pieces[name].shape, chunks)
            for name, chunks in written.chunks.items()
        },
        state=state,
    )


def _record(
    place: SaveDestination, written: Written, state: Any, placed: Sequence[Placed]
) -> Record:
    """The record of one rank, with the rank of each box for the tensors in `placed`."""
    boxes: defaultdict[str, dict[Box, int]] = defaultdict(dict)
    pieces: dict[str, WrittenBox] = {}
    for piece, rank in placed:
        _check_alike(pieces.setdefault(piece.name, piece), piece)
        if piece.box.numel and boxes[piece.name].setdefault(piece.box, rank) == rank:
            _check_once(piece, written, rank == place.rank)
    held = [
        HeldTensor(
            piece.name,
            piece.dtype,
            piece.shape,
            None if piece.local else ExplicitLayout(tuple(boxes[piece.name].items())),
        )
        for piece in pieces.values()
    ]
    return Record(
        step=place.step,
        world_size=place.world_size,
        rank=place.rank,
        attempt=place.attempt,
        block_bytes=BLOCK_BYTES,
        files=written.files,
        held=tuple(held),
        chunks={
            name: kept
            for name, chunks in written.chunks.items()
            if (kept := tuple(chunk for chunk in chunks if chunk.box.numel))
        },
        state=state,
    )


def _leave(fs: Fs, place: SaveDestination, record: Record) -> RecordEntry:
    """Write a record next to the files of its rank, durably."""
    raw, name = record.encode(value_of=value_of), record_name(place.rank, place.world_size)
    fs.write_file(f"{place.partial}/{name}", raw)
    fs.sync_dir(place.partial)
    return RecordEntry(name, len(raw), sha256(raw))


def tree(pieces: Iterable[WrittenBox], nodes: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """The state: the tensors that a planner named, and the values, nested as they were saved."""
    inside = {name for node in nodes.values() for name in tensors_of(node)}
    named = dict.fromkeys(piece.name for piece in pieces if piece.name not in inside)
    return nest({**{name: {"$tensor": name} for name in named}, **nodes}, paths)


def _check_alike(one: WrittenBox, other: WrittenBox) -> None:
    if (one.dtype, one.shape, one.local) != (other.dtype, other.shape, other.local):
        raise UsageError(
            "two ranks save different tensors under one name",
            facts={
                "name": one.name,
                "one": f"{one.dtype} {list(one.shape)}",
                "other": f"{other.dtype} {list(other.shape)}",
            },
        )


def _check_once(piece: WrittenBox, written: Written, is_own: bool) -> None:
    boxes = [chunk.box for chunk in written.chunks.get(piece.name, ())] if is_own else []
    if boxes.count(piece.box) > 1:
        raise UsageError(
            "a rank saves two tensors under one name",
            facts={"name": piece.name, "box": str(piece.box)},
            hint="names are joined with dots: rename a key of the dicts on the way",
        )
