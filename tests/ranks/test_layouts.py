"""Whatever the layouts: what ranks write through the engine, others read through it bit for bit.

Plan, write, record and commit of every rank of one job, on a simulated disk; then the read plan of
every rank of another. Pieces are small, so that boxes begin and end inside of them, and tensors are
split over their replicas already when they are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.checkpoint.save import writes
from statehold.format.saved import PlacedChunk, SavedStep
from statehold.layout import plan, share
from statehold.layout.layout import Box
from statehold.tensors.destinations import Destination
from statehold.tensors.devices import Devices, loading
from support.cuda import Machine, install
from support.laid_out import DTYPES, Arrays, Tensors, opened, tensors_of
from support.layouts import layouts
from support.records import cut

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, writes):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(share, "SPLIT_BYTES", 2 * BLOCK)


@pytest.fixture(
    params=[(0, 3), (1 << 30, None)], ids=["each run by itself", "all runs through scratch"]
)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two devices, whose work is done at seeded moments, or as late as possible."""
    small_bytes, seed = request.param
    monkeypatch.setattr(loading, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(loading, "GAP_BYTES", 64)
    machine = install(monkeypatch, count=2, seed=seed)
    with machine.in_use():
        yield machine


@st.composite
def wholes(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 28), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        values = np.random.default_rng(index).integers(0, 1 << 62, math.prod(shape))
        arrays[f"layers.{index}"] = values.astype(DTYPES[dtype]).reshape(shape)
    return arrays


def laid_out(draw: Any, arrays: Arrays, size: int) -> Tensors:
    return tensors_of(
        arrays, {name: draw(layouts(size, array.ndim)) for name, array in arrays.items()}
    )


def destinations(
    tensors: Tensors, arrays: Arrays, rank: int, is_strided: bool, machine: Machine | None
) -> list[Destination]:
    """Memory for what `rank` holds: as it is stored, or with the dims in another order; on the
    host, or on the two devices of a machine."""
    found = []
    for index, (name, (_, shape, layout)) in enumerate(tensors.items()):
        box = layout.box(shape, rank)
        order = box.shape[::-1] if is_strided else box.shape
        tensor = torch.from_numpy(np.full(order, 77, arrays[name].dtype))
        if is_strided:
            tensor = tensor.permute(tuple(reversed(range(len(shape)))))
        if machine is not None:
            tensor = machine.put(tensor, index % 2)
        found.append(Destination(name, tensor, machine is not None, box, shared=rank % 2 == 1))
    return found


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


@pytest.mark.thorough
@given(wholes(), st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_layout_is_read_into_every_other(
    machine: Machine, arrays: dict[str, np.ndarray[Any, Any]], data: Any
) -> None:
    size, readers = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    with opened(arrays) as disk:
        disk.save(laid_out(data.draw, arrays, size), size)
        tensors = laid_out(data.draw, arrays, readers)
        for rank in range(readers):
            is_strided, on_device = data.draw(st.booleans()), data.draw(st.booleans())
            found = destinations(tensors, arrays, rank, is_strided, machine if on_device else None)
            saved, devices = disk.saved(rank, readers), Devices()
            plan = ReadPlan(saved, found, complete=False, rank=rank, ranks=readers)
            stats = disk.read(plan, devices)
            devices.close()
            for each in found:
                got = machine.read(each.tensor) if on_device else each.tensor
                expected = np.ascontiguousarray(cut(arrays[each.name], each.box))
                assert got.numpy().tobytes() == expected.tobytes(), each.name
            check_bytes(saved, found, stats)
