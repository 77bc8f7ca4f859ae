"""Writes tests/golden/v4: two tiny steps of format version 4, which must load for ever.

Run once; the result is committed and never written again. They hold what version 4 added: a box of
a tensor in several data files. step-000000000011 is of one rank, step-000000000012 of two. The
further files have the headers of an earlier step, as a file has that a step shares with others.

    PYTHONPATH=src:tests python tests/golden/make_v4.py
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from golden.make_v1 import CREATED, WRITER, checksums
from statehold.format.entries import Chunk, FileEntry, TensorEntry, record_file
from statehold.format.manifest import Commit, Manifest, RecordEntry, groups_of, record_name
from statehold.format.record import Record
from statehold.layout.layout import Box, Layout, Mesh
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, plan_save
from statehold.layout.share import HeldTensor

HERE = Path(__file__).parent
EARLIER, ALONE, TOGETHER = 3, 11, 12
ATTEMPT = "5f3a09c1-1"
PLACED = Layout(Mesh((2,), (0, 1)), ((0, 0),))

# File by file: (tensor, dtype, global shape, box).
Parts = Sequence[tuple[str, str, tuple[int, ...], Box]]
WEIGHT, BIAS, ROWS = ("model.weight", (4, 3)), ("model.bias", (5,)), ("model.rows", (7, 2))
ONE_RANK: Sequence[Parts] = (
    [("model.weight", "F32", WEIGHT[1], Box((0, 0), (2, 3)))],
    [
        ("model.weight", "F32", WEIGHT[1], Box((2, 0), (1, 3))),
        ("model.bias", "F32", BIAS[1], Box((0,), (5,))),
    ],
    [
        ("model.weight", "F32", WEIGHT[1], Box((3, 0), (1, 2))),
        ("of no use", "U8", (7,), Box((0,), (7,))),
    ],
    [("model.weight", "F32", WEIGHT[1], Box((3, 2), (1, 1)))],
)
TWO_RANKS: Sequence[Sequence[Parts]] = (
    (
        [("model.rows", "F32", ROWS[1], Box((0, 0), (1, 2)))],
        [("model.rows", "F32", ROWS[1], Box((1, 0), (3, 2)))],
    ),
    ([("model.rows", "F32", ROWS[1], Box((4, 0), (3, 2)))],),
)


def bytes_of(dtype: str, shape: tuple[int, ...], box: Box) -> bytes:
    """Each element is its number in the tensor."""
    numbers = []
    for index in range(box.numel):
        at, number = [], index
        for size in reversed(box.shape):
            number, inside = divmod(number, size)
            at.insert(0, inside)
        place = 0
        for low, inside, size in zip(box.offsets, at, shape, strict=True):
            place = place * size + low + inside
        numbers.append(place)
    return struct.pack(f"<{len(numbers)}{'f' if dtype == 'F32' else 'B'}", *numbers)


def write_files(
    directory: Path, files: Sequence[Parts], step: int, rank: int, world: int, layout: Layout | None
) -> tuple[tuple[FileEntry, ...], dict[str, tuple[Chunk, ...]]]:
    entries, chunks = [], dict[str, tuple[Chunk, ...]]()
    for part, held in enumerate(files):
        data = [bytes_of(dtype, shape, box) for _, dtype, shape, box in held]
        specs = [
            TensorSpec(name, dtype, box.shape, len(raw), False, layout, shape, box.offsets)
            for (name, dtype, shape, box), raw in zip(held, data, strict=True)
        ]
        at = EARLIER if part else step
        plan = plan_save(specs, step=at, world_size=world, rank=rank, part=part)
        content = plan.header + b"".join(data[i] for i in plan.source_index)
        segments = [(0, plan.data_begin)]
        segments += [(b, s.nbytes) for b, s in zip(plan.begins, plan.specs, strict=True)]
        entry, tensors = record_file(plan, checksums(content, segments, hash64()), index=part)
        (directory / plan.file_name).write_bytes(content)
        entries.append(entry)
        for name, found in tensors.items():
            chunks[name] = (*chunks.get(name, ()), *found.chunks)
    return tuple(entries), chunks


def hash64() -> Callable[[bytes], int]:
    from statehold._core import xxh3_64

    return xxh3_64


def state_of(names: Sequence[str]) -> dict[str, Any]:
    return {"model": {name.removeprefix("model."): {"$tensor": name} for name in names}}


def write_step_of_one_rank() -> None:
    directory = HERE / "v4" / f"step-{ALONE:012d}"
    directory.mkdir(parents=True)
    files, chunks = write_files(directory, ONE_RANK, ALONE, 0, 1, None)
    kinds = {name: (dtype, shape) for held in ONE_RANK for name, dtype, shape, _ in held}
    tensors = {name: TensorEntry(*kinds[name], found) for name, found in chunks.items()}
    state = state_of(["model.weight", "model.bias"])
    manifest = Manifest(ALONE, 1, CREATED, WRITER, BLOCK_BYTES, files, tensors, state)
    (directory / "manifest.json").write_bytes(manifest.encode())


def write_step_of_two_ranks() -> None:
    directory = HERE / "v4" / f"step-{TOGETHER:012d}"
    directory.mkdir(parents=True)
    records = []
    for rank, held in enumerate(TWO_RANKS):
        files, chunks = write_files(directory, held, TOGETHER, rank, 2, PLACED)
        what = (HeldTensor("model.rows", "F32", ROWS[1], PLACED),)
        record = Record(
            TOGETHER, 2, rank, ATTEMPT, BLOCK_BYTES, files, what, chunks, state_of(["model.rows"])
        )
        (directory / record_name(rank, 2)).write_bytes(record.encode())
        records.append(record)
    entries = [
        RecordEntry(record_name(rank, 2), len(raw), hashlib.sha256(raw).hexdigest())
        for rank, raw in enumerate(record.encode() for record in records)
    ]
    state = groups_of([record.said() for record in records])
    commit = Commit(TOGETHER, 2, CREATED, WRITER, ATTEMPT, tuple(entries), state)
    (directory / "manifest.json").write_bytes(commit.encode())


if __name__ == "__main__":
    write_step_of_one_rank()
    write_step_of_two_ranks()
