"""Writes tests/golden/v2: a tiny step of format version 2, of four ranks, which must load for ever.

Run once, with `xxhash` installed; the result is committed and never written again: a change to the
format gets a new version and a new directory. Only pure modules are used, so that these bytes
follow docs/format.md and not whatever the engine happens to do.

step-000000000007 has tensors split over all ranks in rows, in rows and columns, and unevenly so
that a rank has nothing; one that is replicated, and one that is so in pairs; one cut in boxes as
the planners of torch.distributed.checkpoint do; one that ranks saved each for itself though it is
the same; and every rank's own. Its values are the same on all ranks, or their own.

    PYTHONPATH=src:tests python tests/golden/make_v2.py
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from golden.make_v1 import CREATED, WRITER, checksums
from statehold.format.entries import record_file
from statehold.format.manifest import Commit, RecordEntry, Shared, groups_of, record_name
from statehold.format.record import Record
from statehold.layout.layout import Box, ExplicitLayout, Layout, Mesh, Ranks
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, plan_save
from statehold.layout.share import HeldTensor

HERE = Path(__file__).parent
STEP, SIZE, ATTEMPT = 7, 4, "5f3a09c1-0"
WORLD, GRID = Mesh((4,), (0, 1, 2, 3)), Mesh((2, 2), (0, 1, 2, 3))
BOXES = ((Box((0, 0), (3, 2)), 1), (Box((0, 2), (3, 3)), 3), (Box((3, 0), (1, 5)), 0))

HELD = (
    HeldTensor("model.rows.weight", "F32", (8, 3), Layout(WORLD, ((0, 0),))),
    HeldTensor("model.rows.bias", "F32", (5,), Layout(WORLD, ((0, 0),))),
    HeldTensor("model.grid.weight", "F32", (4, 6), Layout(GRID, ((0, 0), (1, 1)))),
    HeldTensor("model.pairs.weight", "F32", (2, 3), Layout(GRID, ((1, 0),)), 1),
    HeldTensor("model.norm.weight", "F32", (3,), Layout(WORLD), 2),
    HeldTensor("model.boxes", "F32", (4, 5), ExplicitLayout(BOXES)),
    HeldTensor("model.equal", "F32", (2,), None),
    HeldTensor("own", "F32", (2, 2), None),
)
FIRST = {held.name: 100.0 * index for index, held in enumerate(HELD)}


def element(name: str, index: int, rank: int) -> float:
    """Element number `index` of a global tensor, or of a rank's own one."""
    return FIRST[name] + index + (0.25 * rank if name == "own" else 0)


def values_of(rank: int) -> dict[str, Any]:
    """What is not a tensor, as nodes."""
    return {"epoch": 3, "sampler": {"seed": 1000 + rank, "at": {"$tuple": [rank, 5]}}}


def state_of(rank: int) -> dict[str, Any]:
    names = [held.name.removeprefix("model.") for held in HELD if held.name != "own"]
    model = {name: {"$tensor": f"model.{name}"} for name in names}
    return {"model": model, "own": {"$tensor": "own"}, **values_of(rank)}


def boxes_of(held: HeldTensor, rank: int) -> list[Box]:
    """What `rank` writes of a tensor."""
    if held.layout is None:
        return [Box.whole(held.shape)]
    if isinstance(held.layout, ExplicitLayout):
        return [box for box, owner in BOXES if owner == rank]
    box = held.layout.box(held.shape, rank)
    return [box] if box.numel and held.layout.replica_index(rank) == held.writer else []


def content(held: HeldTensor, box: Box, rank: int) -> bytes:
    """The elements of a box, in C order."""
    found = []
    for number in range(box.numel):
        place = []
        for size in reversed(box.shape):
            number, at = divmod(number, size)
            place.insert(0, at)
        index = 0
        for offset, at, size in zip(box.offsets, place, held.shape, strict=True):
            index = index * size + offset + at
        found.append(element(held.name, index, rank))
    return struct.pack(f"<{len(found)}f", *found)


def write_rank(directory: Path, rank: int, hash64: Callable[[bytes], int]) -> Record:
    parts = [(held, box) for held in HELD for box in boxes_of(held, rank)]
    specs = [
        TensorSpec(
            held.name,
            held.dtype,
            box.shape,
            4 * math.prod(box.shape),
            layout=held.layout if isinstance(held.layout, Layout) else None,
            global_shape=held.shape,
            offsets=box.offsets,
        )
        for held, box in parts
    ]
    plan = plan_save(specs, step=STEP, world_size=SIZE, rank=rank)
    data = [content(held, box, rank) for held, box in parts]
    raw = plan.header + b"".join(data[index] for index in plan.source_index)
    segments = [(0, plan.data_begin)]
    segments += [(b, s.nbytes) for b, s in zip(plan.begins, plan.specs, strict=True)]
    file, tensors = record_file(plan, checksums(raw, segments, hash64))
    (directory / plan.file_name).write_bytes(raw)
    chunks = {name: entry.chunks for name, entry in tensors.items()}
    contents = {"model.equal": f"{hash64(content(HELD[6], Box.whole((2,)), rank)):016x}"}
    record = Record(
        STEP, SIZE, rank, ATTEMPT, BLOCK_BYTES, (file,), HELD, chunks, state_of(rank), contents
    )
    (directory / record_name(rank, SIZE)).write_bytes(record.encode())
    return record


def main() -> None:
    import xxhash

    directory = HERE / "v2" / f"step-{STEP:012d}"
    directory.mkdir(parents=True)
    records = [write_rank(directory, rank, xxhash.xxh3_64_intdigest) for rank in range(SIZE)]
    raws = [record.encode() for record in records]
    entries = tuple(
        RecordEntry(record_name(rank, SIZE), len(raw), hashlib.sha256(raw).hexdigest())
        for rank, raw in enumerate(raws)
    )
    state = groups_of([record.group_digests() for record in records])
    shared = (Shared(Ranks.of(range(SIZE)), ("model.equal",)),)
    commit = Commit(STEP, SIZE, CREATED, WRITER, ATTEMPT, entries, state, shared)
    (directory / "manifest.json").write_bytes(commit.encode())


if __name__ == "__main__":
    main()
