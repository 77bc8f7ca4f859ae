"""Whatever the layouts: a step of any world is read bit for bit by any other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statehold.format.manifest import Manifest
from statehold.format.record import Record
from statehold.layout.layout import AnyLayout, Layout
from statehold.layout.share import HeldTensor
from support.layouts import explicit, layouts
from support.records import DIRECTORY, DTYPES, World, cut


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(1, 8))
    held, arrays = [], {}
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        layout: AnyLayout = draw(st.one_of(layouts(size, len(shape)), explicit(size, shape)))
        count = layout.replica_count if isinstance(layout, Layout) else 1
        name = f"layers.{i}.weight"
        held.append(HeldTensor(name, dtype, shape, layout, draw(st.integers(0, count - 1))))
        values = np.random.default_rng(i).integers(0, 255, math.prod(shape))
        arrays[name] = values.astype(DTYPES[dtype]).reshape(shape)
    return World([held] * size, arrays)


@pytest.mark.thorough
@given(worlds(), st.data())
@settings(max_examples=150, deadline=None)
def test_every_layout_reads_every_other(world: World, data: Any) -> None:
    size = data.draw(st.integers(1, 8))
    rank = data.draw(st.integers(0, size - 1))
    step = world.open(rank, size)
    assert set(step.tensors) == set(world.arrays)
    for name, array in world.arrays.items():
        layout = data.draw(layouts(size, array.ndim))
        box = layout.box(array.shape, rank)
        part = world.assemble(step, name, box)
        assert part.tobytes() == cut(array, box).tobytes()


@pytest.mark.thorough
@given(worlds(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_same_layout_reads_few_records(world: World, data: Any) -> None:
    rank = data.draw(st.integers(0, world.size - 1))
    step = world.open(rank, world.size)
    writers = {rank}
    for held in world.records[rank].held:
        if isinstance(held.layout, Layout):
            world.assemble(step, held.name, held.layout.box(held.shape, rank))
            writers.add(held.layout.replicas(rank)[held.writer])
    named = {file.name for writer in writers for file in world.records[writer].files}
    assert {file.name for file in step.files} <= named


@pytest.mark.thorough
@given(worlds())
@settings(max_examples=100, deadline=None)
def test_records_and_manifests_round_trip(world: World) -> None:
    for record in world.records:
        raw = record.encode()
        back = Record.decode(raw, "r")
        assert back.encode() == raw
        assert (back.state, back.chunks, back.files) == (record.state, record.chunks, record.files)
    raw = world.files[f"{DIRECTORY}/manifest.json"]
    assert Manifest.decode(raw, "m") == world.commit
    assert world.commit.encode() == raw
