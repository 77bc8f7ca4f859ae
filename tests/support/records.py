"""Steps of several ranks, in memory: records, manifest and data, from arrays and layouts."""

from __future__ import annotations

import errno
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from statehold.errors import StorageError
from statehold.format.entries import record_file
from statehold.format.manifest import Commit, RecordEntry, Shared, groups_of, record_name
from statehold.format.record import Record
from statehold.format.saved import SavedStep, open_step
from statehold.layout.layout import Box, ExplicitLayout, Layout, Mesh
from statehold.layout.plan import TensorSpec, plan_save
from statehold.layout.share import HeldTensor
from support.faults import must
from support.steps import Sums, document_of, false_sums, seal

DTYPES = {"F64": np.float64, "I64": np.int64, "U8": np.uint8, "I16": np.int16}
DIRECTORY, ATTEMPT = "run/step-000000000007", "5eed-1"
CREATED = "2026-11-21T07:00:00+00:00"


def cut(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    """The part of an array in a box."""
    ranges = zip(box.offsets, box.ends, strict=True)
    return array[(..., *(slice(a, b) for a, b in ranges))]


def boxes_written(held: HeldTensor, rank: int) -> list[Box]:
    """What `rank` writes of a tensor that it holds."""
    if isinstance(held.layout, ExplicitLayout):
        return sorted(held.layout.boxes_of(rank), key=lambda box: (box.offsets, box.shape))
    if held.layout is None:
        return [Box.whole(held.shape)]
    if held.layout.replica_index(rank) != held.writer:
        return []
    box = held.layout.box(held.shape, rank)
    return [box] if box.numel else []


class World:
    """A committed step. `held[rank]` is what each rank holds, `arrays` the global tensors, and
    `own[rank]` the tensors that are a rank's own."""

    def __init__(
        self,
        held: Sequence[Sequence[HeldTensor]],
        arrays: Mapping[str, np.ndarray[Any, Any]],
        own: Sequence[Mapping[str, np.ndarray[Any, Any]]] = (),
        extra: Sequence[Mapping[str, Any]] = (),
        shared: Sequence[Shared] = (),
        sums: Sums = false_sums,
    ) -> None:
        self.sums = sums
        self.size = len(held)
        self.arrays = arrays
        self.own = own
        self.files: dict[str, bytes] = {}
        self.records = [
            self._record(rank, each, extra[rank] if extra else {}) for rank, each in enumerate(held)
        ]
        self.commit = self.commit_of(shared)
        self.store(self.commit, self.records)

    def store(self, commit: Commit, records: Iterable[Record]) -> None:
        """Put manifest and records where `open` reads them."""
        for record in records:
            name = record_name(record.rank, record.world_size)
            self.files[f"{DIRECTORY}/{name}"] = record.encode()
        self.files[f"{DIRECTORY}/manifest.json"] = commit.encode()

    def open(self, rank: int, world_size: int) -> SavedStep:
        return open_step(self.read, DIRECTORY, 7, rank, world_size)

    def read(self, path: str, max_bytes: int) -> bytes:
        if path not in self.files:
            raise StorageError("cannot read", errno=errno.ENOENT, path=path)
        raw = self.files[path]
        if len(raw) > max_bytes:
            raise StorageError("cannot read", errno=errno.EFBIG, path=path)
        return raw

    def _record(self, rank: int, held: Sequence[HeldTensor], extra: Mapping[str, Any]) -> Record:
        written = [(each, box) for each in held for box in boxes_written(each, rank)]
        layers: list[list[tuple[HeldTensor, Box]]] = []
        for each, box in written:  # a file holds a name once
            at = sum(each.name == other.name for layer in layers for other, _ in layer)
            if at == len(layers):
                layers.append([])
            layers[at].append((each, box))
        files, chunks = [], {}
        for index, layer in enumerate(layers):
            file, found = self._write(rank, index, layer)
            files.append(file)
            for name, entry in found.items():
                chunks[name] = (*chunks.get(name, ()), *entry.chunks)
        state = {"model": {each.name: {"$tensor": each.name} for each in held}, **extra}
        return Record(
            7, self.size, rank, ATTEMPT, 1 << 20, tuple(files), tuple(held), chunks, state
        )

    def _write(self, rank: int, index: int, layer: Sequence[tuple[HeldTensor, Box]]) -> Any:
        specs, contents = [], []
        for held, box in layer:
            whole = self.own[rank][held.name] if held.layout is None else self.arrays[held.name]
            raw = cut(whole, box).tobytes()
            spec = TensorSpec(held.name, held.dtype, box.shape, len(raw))
            specs.append(_placed_spec(spec, held, box))
            contents.append(raw)
        plan = plan_save(specs, step=7, world_size=self.size, rank=rank)
        content = plan.header + b"".join(contents[i] for i in plan.source_index)
        file, tensors = record_file(plan, self.sums(plan, content), index=index)
        if index:
            name = file.name.replace(".safetensors", f"-{index}.safetensors")
            file = type(file)(name, file.bytes, file.data_begin, file.header_sums, file.digest)
        self.files[f"{DIRECTORY}/{file.name}"] = content
        return file, tensors

    def commit_of(self, shared: Sequence[Shared]) -> Commit:
        raws = [record.encode() for record in self.records]
        entries = [
            RecordEntry(record_name(i, self.size), len(raw), hashlib.sha256(raw).hexdigest())
            for i, raw in enumerate(raws)
        ]
        state = groups_of([record.group_digests() for record in self.records])
        return Commit(7, self.size, CREATED, "test", ATTEMPT, tuple(entries), state, tuple(shared))

    def assemble(self, step: SavedStep, name: str, box: Box) -> np.ndarray[Any, Any]:
        """A box of a tensor from the chunks that the step names."""
        result = np.zeros(box.shape, DTYPES[step.tensors[name].dtype])
        for chunk in step.chunks(name, box):
            raw = self.files[f"{DIRECTORY}/{chunk.file}"]
            must(len(raw) == chunk.file_bytes)
            part = np.frombuffer(raw[chunk.begin : chunk.end], result.dtype)
            part = part.reshape(chunk.box.shape)
            met = chunk.box.intersection(box)
            assert met is not None
            cut(result, met.relative_to(box))[...] = cut(part, met.relative_to(chunk.box))
        return result


def _placed_spec(spec: TensorSpec, held: HeldTensor, box: Box) -> TensorSpec:
    layout = held.layout if isinstance(held.layout, Layout) else None
    return TensorSpec(
        spec.name,
        spec.dtype,
        spec.shape,
        spec.nbytes,
        layout=layout,
        global_shape=held.shape,
        offsets=box.offsets,
    )


def rewritten(raw: bytes, change: Any, what: str) -> bytes:
    """A document with `change` applied to its JSON, sealed anew."""
    document = document_of(raw, what)
    change(document)
    return seal(document, what)


def example(sums: Sums = false_sums) -> World:
    """Four ranks with a tensor of each kind: sharded, replicated, cut freely, a rank's own."""
    grid, row = Mesh((2, 2), (0, 1, 2, 3)), Mesh((4,), (3, 1, 0, 2))
    boxes = [(Box((0,), (3,)), 1), (Box((3,), (4,)), 0), (Box((7,), (1,)), 0)]
    held = [
        HeldTensor("sharded", "I64", (6, 4), Layout(grid, ((0, 0), (1, 1)))),
        HeldTensor("uneven", "I16", (5,), Layout(row, ((0, 0),))),
        HeldTensor("replicated", "F64", (3,), Layout(grid), 2),
        HeldTensor("free", "U8", (8,), ExplicitLayout(tuple(boxes))),
        HeldTensor("own", "I64", (2,), None),
    ]
    arrays = {
        each.name: np.arange(math.prod(each.shape)).astype(DTYPES[each.dtype]).reshape(each.shape)
        for each in held
    }
    own = [{"own": np.array([rank, 5])} for rank in range(4)]
    values = [{"epoch": 3, "seed": rank} for rank in range(4)]
    return World([held] * 4, arrays, own, values, sums=sums)
