"""Whatever the layouts: what ranks write through the engine, others read through it bit for bit.

Plan, write, record and commit of every rank of one job, on a simulated disk; then the read plan of
every rank of another. Pieces are small, so that boxes begin and end inside of them, and tensors are
split over their replicas already when they are small.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statehold import _core, reads, writes
from statehold.planning import share
from statehold.planning.layout import Box, Layout
from statehold.planning.share import PlanCache
from statehold.state.capture import CapturedTensor
from statehold.state.destinations import Destination
from statehold.state.tensors import strides_of
from statehold.steps.entries import record_file
from statehold.steps.manifest import Commit, RecordEntry, groups_of, record_name
from statehold.steps.saved import PlacedChunk, SavedStep
from statehold.storage.store import Store
from statehold.testing import SimFs
from support.faults import DEADLINE_S
from support.layouts import layouts
from support.meshes import local_specs
from support.records import CREATED, cut

RUN, STEP, ATTEMPT = "/runs/x", 7, "5f3a09c1-0"
BLOCK = 4096
MIB = 1 << 20
DTYPES = {"F64": np.float64, "I16": np.int16, "U8": np.uint8}
Tensors = dict[str, tuple[str, tuple[int, ...], Layout]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "BLOCK_BYTES", BLOCK)
    small = functools.partial(record_file, block_bytes=BLOCK)
    monkeypatch.setattr(writes, "record_file", small)
    monkeypatch.setattr(share, "SPLIT_BYTES", 2 * BLOCK)


@dataclass
class Disk:
    """A run directory, an engine on it, and the global tensors."""

    fs: SimFs
    engine: _core.Engine
    arrays: dict[str, np.ndarray[Any, Any]]

    def save(self, tensors: Tensors, size: int) -> None:
        """All ranks write their parts of the step, and rank 0 commits it."""
        stores = [Store(self.fs, RUN, rank=rank, world_size=size) for rank in range(size)]
        stores[0].create()
        raws, said = [], []
        for rank, store in enumerate(stores):
            record = self._write(store, tensors, rank, size)
            raws.append(record.encode())
            said.append(record.said())
            store.seal(STEP, ATTEMPT, record_name(rank, size), raws[-1])
        entries = [
            RecordEntry(record_name(rank, size), len(raw), hashlib.sha256(raw).hexdigest())
            for rank, raw in enumerate(raws)
        ]
        state = groups_of(said)
        commit = Commit(STEP, size, CREATED, "test", ATTEMPT, tuple(entries), state, ())
        stores[0].commit(commit, ATTEMPT)

    def _write(self, store: Store, tensors: Tensors, rank: int, size: int) -> Any:
        specs = local_specs(tensors, rank)
        captured = []
        for spec in specs:
            box = Box(spec.offsets or (), spec.shape)
            tensor = torch.from_numpy(cut(self.arrays[spec.name], box))  # mostly not contiguous
            captured.append(
                CapturedTensor(
                    spec, tensor, 0, tensor.data_ptr(), strides_of(tensor), False, False, None
                )
            )
        plan = PlanCache(world_size=size, rank=rank).get(specs, STEP)
        job = writes.start_write(self.engine, plan.save, writes.in_file_order(plan, captured))
        store.begin(STEP, ATTEMPT)
        file, _ = store.data_file(STEP, plan.save.file_name, plan.save.file_bytes, ATTEMPT)
        job.attach(file)
        job.wait_written(DEADLINE_S)
        job.finish()
        tree = {spec.name: {"$tensor": spec.name} for spec in specs}
        return writes.build_record(plan, tree, job.checksums(), ATTEMPT, {})


@st.composite
def wholes(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 28), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        values = np.random.default_rng(index).integers(0, 1 << 62, math.prod(shape))
        arrays[f"layers.{index}"] = values.astype(DTYPES[dtype]).reshape(shape)
    return arrays


def laid_out(draw: Any, arrays: Mapping[str, np.ndarray[Any, Any]], size: int) -> Tensors:
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    return {
        name: (names[array.dtype], array.shape, draw(layouts(size, array.ndim)))
        for name, array in arrays.items()
    }


def destinations(
    tensors: Tensors, arrays: Mapping[str, np.ndarray[Any, Any]], rank: int, how: str
) -> list[Destination]:
    """Memory for what `rank` holds: as it is stored, with the dims in another order, or not
    for the engine to reach."""
    found = []
    for name, (_, shape, layout) in tensors.items():
        box = layout.box(shape, rank)
        order = box.shape[::-1] if how == "strided" else box.shape
        memory = torch.from_numpy(np.full(order, 77, arrays[name].dtype))
        tensor = memory.permute(tuple(reversed(range(len(shape))))) if how == "strided" else memory
        found.append(Destination(name, tensor, how == "external", box, shared=rank % 2 == 1))
    return found


def read(engine: _core.Engine, plan: reads.ReadPlan, directory: str) -> dict[str, int]:
    """Read all; play the part of the device for memory that the engine cannot reach."""
    reading = plan.start(engine, lambda name, *_: f"{directory}/{name}")
    external = reading.external()
    while (ready := reading.job.next_ready(DEADLINE_S)) is not None:
        for segment, offset, at, count in ready.pieces:
            place = external[segment].reshape(-1).view(torch.uint8)
            place[offset : offset + count] = torch.frombuffer(
                bytearray(ready.view[at : at + count]), dtype=torch.uint8
            )
        reading.job.release(ready)
    reading.job.wait(DEADLINE_S)
    reading.land()
    return reading.job.stats


def bytes_allowed(chunk: PlacedChunk, box: Box, item_bytes: int) -> int:
    """The pieces with wanted elements, and those beside them, which may fill a short gap."""
    common = chunk.box.intersection(box)
    if common is None:
        return 0
    flat = np.arange(chunk.box.numel).reshape(chunk.box.shape)
    at = chunk.begin + cut(flat, common.relative_to(chunk.box)).reshape(-1) * item_bytes
    blocks = {int(block) + side for block in np.unique(at // BLOCK) for side in (-1, 0, 1)}
    ends = [
        (max(chunk.begin, block * BLOCK), min(chunk.end, (block + 1) * BLOCK)) for block in blocks
    ]
    return sum(end - begin for begin, end in ends if end > begin)


def check_bytes(saved: SavedStep, found: list[Destination], stats: dict[str, int]) -> None:
    """No more was read than whole pieces need, and the headers of the files they are in."""
    allowed, headers = 0, {}
    begins = {file.name: file.data_begin for file in saved.files}
    for each in found:
        for chunk in saved.chunks(each.name, each.box):
            allowed += bytes_allowed(chunk, each.box, each.tensor.element_size())
            headers[chunk.file] = begins[chunk.file]
    assert stats["bytes"] <= allowed + sum(headers.values())


@given(wholes(), st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_layout_is_read_into_every_other(
    arrays: dict[str, np.ndarray[Any, Any]], data: Any
) -> None:
    size, readers = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    fs = SimFs(seed=1, short_io=0.2)
    engine = _core.Engine(fs, 2 * MIB, MIB, 2)
    try:
        disk = Disk(fs, engine, arrays)
        disk.save(laid_out(data.draw, arrays, size), size)
        tensors = laid_out(data.draw, arrays, readers)
        for rank in range(readers):
            store = Store(fs, RUN, rank=rank, world_size=readers)
            saved = store.open(STEP, rank, readers)
            how = data.draw(st.sampled_from(["plain", "strided", "external"]))
            found = destinations(tensors, arrays, rank, how)
            plan = reads.ReadPlan(saved, found, complete=False, rank=rank, ranks=readers)
            stats = read(engine, plan, store.path(STEP))
            for each in found:
                expected = np.ascontiguousarray(cut(arrays[each.name], each.box))
                assert each.tensor.numpy().tobytes() == expected.tobytes(), (each.name, how)
            check_bytes(saved, found, stats)
    finally:
        engine.close()
