"""From a plan to the engine: starts the write of a rank's file, and makes its documents.

Owns: the order of segments, which is the same on both sides. Segment 0 of a write is the header of
the file, and segment i + 1 is the i-th tensor in file order.
Not here: who writes which box (share), places in the file (plan), the fate of the file (store).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from datetime import datetime, timezone
from itertools import compress
from operator import mul, not_
from typing import TYPE_CHECKING, Any

from statehold import _core
from statehold._version import __version__
from statehold.format.entries import record_file
from statehold.format.manifest import Manifest
from statehold.format.record import Record
from statehold.io.clients import Client
from statehold.layout.plan import BLOCK_BYTES, SavePlan, piece_count
from statehold.layout.share import RankPlan
from statehold.tensors.storable import strides_of

if TYPE_CHECKING:
    from statehold._core import Engine, File, WriteJob
    from statehold.tensors.captured import CapturedTensor, Tensors


def in_file_order(plan: RankPlan, captured: Tensors) -> Tensors:
    """The tensors that this rank writes, in file order: whole boxes, or some of their rows."""
    parts = [plan.share.parts[index] for index in plan.save.source_index]
    sources = [part.source for part in parts]
    cut = [(index, part.rows) for index, part in enumerate(parts) if part.rows is not None]
    if not cut and sources == list(range(len(captured))):
        return captured
    ordered = captured.picked(sources)
    for index, rows in cut:
        ordered[index] = _rows(ordered[index], *rows)
    return ordered


def _rows(captured: CapturedTensor, begin: int, end: int) -> CapturedTensor:
    tensor = captured.tensor[begin:end]
    return captured._replace(tensor=tensor, address=tensor.data_ptr(), strided=strides_of(tensor))


def start_write(
    engine: Engine, plan: SavePlan, ordered: Tensors, file: File | None = None
) -> WriteJob:
    """Begin to stage the tensors, in file order, as `plan` lays them out.

    file: if it exists already. The job keeps the tensors alive until they are copied.
    """
    external = ordered.external
    flags = bytearray(map(_core.SEGMENT_EXTERNAL.__mul__, external))
    for index in ordered.eager():
        flags[index] |= _core.SEGMENT_EAGER
    strided = {i: each for i, each in enumerate(ordered.strided) if each and not external[i]}
    on_host = list(map(not_, external))
    return engine.write(
        file_bytes=plan.file_bytes,
        block_bytes=BLOCK_BYTES,
        begins=array("q", plan.begins),
        sizes=array("q", [spec.nbytes for spec in plan.specs]),
        addresses=array("Q", map(mul, ordered.addresses, on_host)),
        flags=bytes(flags),
        strided=strided,
        header=plan.header,
        owner=tuple(compress(ordered.aliases, on_host)),
        file=file,
        client=Client.SAVE,
    )


def build_manifest(plan: SavePlan, tree: Any, sums: bytes) -> Manifest:
    """The commit record of a single-rank step, from its plan and the checksums of its bytes."""
    file, tensors = record_file(plan, sums)
    return Manifest(
        step=plan.step,
        world_size=1,
        created=now(),
        writer=writer_name(),
        block_bytes=BLOCK_BYTES,
        files=(file,),
        tensors=tensors,
        state=tree,
    )


def build_record(
    plan: RankPlan, tree: Any, sums: bytes, attempt: str, fingerprints: Mapping[str, int]
) -> Record:
    """The record of one of several ranks."""
    file, tensors = record_file(plan.save, sums)
    return Record(
        step=plan.save.step,
        world_size=plan.save.world_size,
        rank=plan.save.rank,
        attempt=attempt,
        block_bytes=BLOCK_BYTES,
        files=(file,),
        held=plan.share.held,
        chunks={name: entry.chunks for name, entry in tensors.items()},
        state=tree,
        contents={name: f"{value:016x}" for name, value in fingerprints.items()},
    )


def manifest_bytes(plan: SavePlan, tree: Any) -> int:
    """The bytes of the manifest of a single-rank step, before its checksums are known."""
    return len(build_manifest(plan, tree, _no_sums(plan)).encode())


def record_bytes(plan: RankPlan, tree: Any, attempt: str) -> int:
    """The bytes of a rank's record, before its checksums are known; without fingerprints."""
    return len(build_record(plan, tree, _no_sums(plan.save), attempt, {}).encode())


def _no_sums(plan: SavePlan) -> bytes:
    places = zip(plan.begins, (spec.nbytes for spec in plan.specs), strict=True)
    pieces = sum(piece_count(begin, nbytes, BLOCK_BYTES) for begin, nbytes in places)
    return bytes(8 * (piece_count(0, plan.data_begin, BLOCK_BYTES) + pieces))


def now() -> str:
    """The time as a manifest records it."""
    return datetime.now(timezone.utc).isoformat()


def writer_name() -> str:
    """The writer, for a manifest."""
    return f"statehold {__version__}"
