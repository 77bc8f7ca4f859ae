"""One rank's part of a save: the planner's items -> data files, and the facts for the commit.

A safetensors file holds a name once, so the n-th chunk of a name goes to the rank's n-th file.
Tensors are copied from the places that the planner shows, device memory in pieces through the
staging buffers. If a planner makes new tensors in resolve_data (to convert dtypes, say), all of a
rank's new tensors exist at once: the layout of a file is known before its first byte is written.

Owns: the file of each chunk, and the encoding of values.
Invariants: an error of any item, copy or write is raised here, on the thread that torch waits for.
Nothing is pickled: a value that no step can hold is UnsupportedValueError with the name that torch
gives it.
Not here: who writes what (the planner), records and manifest (writer), what becomes of the files
of an attempt that fails (writer).
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from statehold._core import Engine, Fs
from statehold.checkpoint.save.writes import Ordered, Segments, start_write
from statehold.errors import UnsupportedValueError, UsageError
from statehold.format.entries import Chunk, FileEntry, record_file
from statehold.integrations.dcp.machine import Machine
from statehold.io.memory_room import open_file
from statehold.layout.layout import Box
from statehold.layout.plan import TensorSpec, plan_save
from statehold.tensors import dtypes
from statehold.tensors.captured import Capture
from statehold.tensors.columns import CapturedTensor, Tensors, described
from statehold.tensors.devices import Devices
from statehold.tensors.devices.jobs import JobSource
from statehold.tensors.kinds import capture
from statehold.tensors.storable import check_storable, is_external, is_view_of_other_values


@dataclass(frozen=True, slots=True)
class SaveDestination:
    """The destination of a save, as every rank learns it from its plan."""

    final: str
    partial: str
    step: int
    rank: int
    world_size: int
    attempt: str


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box of a tensor that this rank wrote. `local`: other ranks may have other values."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # global
    box: Box
    local: bool


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one rank, and the nodes of its values by the names torch gives them."""

    files: tuple[FileEntry, ...]
    chunks: dict[str, tuple[Chunk, ...]]
    pieces: tuple[WrittenBox, ...]
    values: dict[str, Any]


@dataclass(slots=True)
class _PlanItems:
    """The items of a plan, ready to be written."""

    tensors: list[CapturedTensor]
    pieces: list[WrittenBox]
    values: dict[str, Any]


def write_items(
    machine: Machine,
    fs: Fs,
    place: SaveDestination,
    plan: SavePlan,
    planner: SavePlanner,
    alone: bool,
) -> Written:
    """Write the data files of one rank, durably (D1, D2).

    `alone`: the ranks did not share out the writing, so plain tensors of one name may differ
    between them.
    """
    items = _resolve(plan, planner, alone)
    nbytes = sum(tensor.spec.nbytes for tensor in items.tensors)
    files: list[FileEntry] = []
    chunks: dict[str, tuple[Chunk, ...]] = {}
    with machine.engine(fs, nbytes) as engine, contextlib.closing(Devices()) as devices:
        # With several ranks, a rank with an empty box of a tensor does not have it in its files.
        kept = [each for each in items.tensors if each.spec.nbytes or place.world_size == 1]
        for index, tensors in enumerate(_by_file(kept)):
            file_plan = plan_save(
                [tensor.spec for tensor in tensors],
                step=place.step,
                world_size=place.world_size,
                rank=place.rank,
                part=index,
            )
            path = f"{place.partial}/{file_plan.file_name}"
            sums = _write_file(machine, engine, devices, fs, path, file_plan, tensors)
            file, entries = record_file(file_plan, sums, index=index)
            files.append(file)
            for name, entry in entries.items():
                chunks[name] = (*chunks.get(name, ()), *entry.chunks)
    return Written(tuple(files), chunks, tuple(items.pieces), items.values)


def _resolve(plan: SavePlan, planner: SavePlanner, alone: bool) -> _PlanItems:
    found = _PlanItems([], [], {})
    for item in plan.items:
        add = _add_value if item.type == WriteItemType.BYTE_IO else _add_tensor
        add(found, item, planner, alone)
    return found


def _add_tensor(found: _PlanItems, item: WriteItem, planner: SavePlanner, alone: bool) -> None:
    name, data = item.index.fqn, item.tensor_data
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or data is None:
        raise UsageError(
            "a planner gave something else than the tensor it had planned",
            facts={"name": name, "got": type(tensor).__name__},
        )
    tensor = _plain(tensor, name)
    if tensor.shape != data.chunk.sizes:
        raise UsageError(
            "a planner gave a tensor of another shape than it had planned",
            facts={"name": name, "expected": [*data.chunk.sizes], "got": [*tensor.shape]},
        )
    stored = [
        dtypes.stored_shape(tensor.dtype, tuple(sizes), name)
        for sizes in (data.size, data.chunk.offsets, data.chunk.sizes)
    ]
    shape, box = stored[0], Box(stored[1], stored[2])
    local = alone and item.type == WriteItemType.TENSOR
    code = dtypes.code_of(tensor.dtype, name)
    found.pieces.append(WrittenBox(name, code, shape, box, local))
    found.tensors.append(_captured(tensor, found.pieces[-1]))


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor without history or subclass; its memory holds the values that it shows."""
    tensor = tensor.detach()
    check_storable(tensor, name)
    if is_view_of_other_values(tensor):
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _captured(tensor: torch.Tensor, piece: WrittenBox) -> CapturedTensor:
    spec = TensorSpec(
        piece.name,
        piece.dtype,
        piece.box.shape,
        tensor.numel() * tensor.element_size(),
        global_shape=piece.shape,
        offsets=piece.box.offsets,
    )
    return described(spec, tensor, external=is_external(tensor))


def _add_value(found: _PlanItems, item: WriteItem, planner: SavePlanner, alone: bool) -> None:
    """A value is stored as itself; tensors inside it get names below its own."""
    name = item.index.fqn
    captured = capture({name: _object_of(item, planner)})
    for number in captured.numbers:  # this thread may wait for the device
        number.fill_in(number.tensor.item())
    found.values[name] = _only(captured.tree)
    for tensor in captured.tensors:
        spec = tensor.spec
        piece = WrittenBox(spec.name, spec.dtype, spec.shape, Box.whole(spec.shape), alone)
        found.pieces.append(piece)
        found.tensors.append(tensor)


def _only(tree: Any) -> Any:
    """The node of the one member of an encoded dict."""
    if "$dict" in tree:
        ((_, node),) = tree["$dict"]
        return node
    (node,) = tree.values()
    return node


def _object_of(item: WriteItem, planner: SavePlanner) -> Any:
    """The object of a BYTE_IO item: the planner's, or else from its bytes."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is not None:
        return lookup(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise UsageError(
            "a planner gave something else than the bytes it had planned",
            facts={"name": item.index.fqn, "got": type(data).__name__},
        )
    data.seek(0)
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as fault:
        raise UnsupportedValueError(
            "a planner pickled a value that cannot be read safely",
            facts={"path": item.index.fqn, "cause": str(fault).splitlines()[0]},
            hint="give the planner a lookup_object(index), or store plain values",
        ) from fault


def _by_file(tensors: Iterable[CapturedTensor]) -> list[list[CapturedTensor]]:
    """Check that no name is twice in a file; at least one file."""
    files: list[list[CapturedTensor]] = [[]]
    counts: dict[str, int] = {}
    for tensor in tensors:
        index = counts[tensor.spec.name] = counts.get(tensor.spec.name, -1) + 1
        if index == len(files):
            files.append([])
        files[index].append(tensor)
    return files


def _write_file(
    machine: Machine,
    engine: Engine,
    devices: Devices,
    fs: Fs,
    path: str,
    plan: Any,
    tensors: Sequence[CapturedTensor],
) -> bytes:
    begin_s = time.perf_counter()
    ordered = Tensors(tensors[index] for index in plan.source_index)
    job = start_write(engine, plan, Ordered(ordered, Segments.of(plan, ordered.structure)))
    try:
        job.attach(open_file(fs, path, plan.file_bytes))
        copies = devices.copies([JobSource(job, ordered)], Capture(ordered, None))
        if copies is not None:
            copies.run()
        job.wait_written(None)
        job.finish()  # D2
        machine.watch.save_moved(plan.step, begin_s, job.stats)
        return job.checksums()
    except BaseException:
        job.cancel()
        raise
