"""Whatever the layouts: every element is written once, and the replicas of a mesh write alike."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statehold.encoding.header import bytes_of
from statehold.format.entries import record_file
from statehold.format.record import Record
from statehold.layout import share as module
from statehold.layout.layout import Box, Layout
from statehold.layout.plan import BLOCK_BYTES, plan_save
from statehold.layout.share import Share, share
from support.meshes import layouts, local_specs, meshes
from support.steps import sums_for

Tensors = Mapping[str, tuple[str, Sequence[int], Layout]]


@st.composite
def states(draw: st.DrawFn) -> tuple[Tensors, int]:
    """{name: (dtype, shape, layout)} over several meshes of one world, and its size."""
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]))
    grids = draw(st.lists(meshes(world), min_size=1, max_size=2))
    tensors = {}
    for index in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        shape = draw(st.sampled_from([shape, (draw(st.integers(40, 300)), 3)]))
        layout = draw(layouts(draw(st.sampled_from(grids)), len(shape)))
        tensors[f"t{index}"] = draw(st.sampled_from(["F32", "BF16", "U8"])), shape, layout
    return tensors, world


def small_limits() -> AbstractContextManager[Any]:
    """Tests with real limits would need gigabytes of elements."""
    return mock.patch.multiple(module, SPLIT_BYTES=64, PIECE_BYTES=16)


def shares(tensors: Tensors, world: int) -> list[Share]:
    with small_limits():
        return [share(local_specs(tensors, rank), rank) for rank in range(world)]


def elements(box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, box.offsets, box.ends))


@pytest.mark.thorough
@settings(max_examples=300)
@given(states())
def test_every_element_is_written_once(state: tuple[Tensors, int]) -> None:
    tensors, world = state
    written: defaultdict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for own in shares(tensors, world):
        for part in own.parts:
            assert part.spec.offsets is not None
            written[part.spec.name].update(elements(Box(part.spec.offsets, part.spec.shape)))
    for name, (_, shape, _) in tensors.items():
        if all(shape):
            assert written[name] == Counter(elements(Box.whole(shape))), name
        else:
            assert not written[name]


@pytest.mark.thorough
@given(states())
def test_parts_are_rows_of_what_was_captured(state: tuple[Tensors, int]) -> None:
    tensors, world = state
    for rank, own in enumerate(shares(tensors, world)):
        specs = local_specs(tensors, rank)
        assert [held.name for held in own.held] == [spec.name for spec in specs]
        for part in own.parts:
            spec = specs[part.source]
            assert part.spec.nbytes == bytes_of(spec.dtype, part.spec.shape)
            if part.rows is None:
                assert part.spec == spec
            else:
                begin, end = part.rows
                assert 0 <= begin < end <= spec.shape[0]
                assert part.spec.shape == (end - begin, *spec.shape[1:])
                assert part.spec.offsets == (spec.offsets[0] + begin, *spec.offsets[1:])


@pytest.mark.thorough
@given(states())
def test_ranks_agree_and_their_records_say_who_wrote(state: tuple[Tensors, int]) -> None:
    """`held` is the same on all ranks, and enough to find the writer of any box."""
    tensors, world = state
    every = shares(tensors, world)
    said = {held for own in every for held in own.held}
    assert len(said) == len(tensors)
    for held in said:
        assert held.layout is not None
        expected = {
            (ranks[held.writer], box) for box, ranks in held.layout.boxes(held.shape) if box.numel
        }
        got = {
            (rank, Box(part.spec.offsets, part.spec.shape))
            for rank, own in enumerate(every)
            for part in own.parts
            if part.spec.name == held.name
        }
        # A mesh of one rank also writes what is empty: nobody else could tell that it exists.
        assert {(rank, box) for rank, box in got if box.numel} == expected


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Tensors, int]:
    """Many small tensors, all replicated."""
    world = draw(st.sampled_from([2, 3, 8, 12]))
    layout = Layout(draw(meshes(world)))
    rows = draw(st.lists(st.integers(1, 60), max_size=60))
    return {f"t{index}": ("U8", (size,), layout) for index, size in enumerate(rows)}, world


@pytest.mark.thorough
@settings(max_examples=300)
@given(st.one_of(states(), crowds()))
def test_no_replica_writes_more_than_the_mean_and_one_item(state: tuple[Tensors, int]) -> None:
    """The bound of longest-processing-time, by the largest box of every tensor."""
    tensors, world = state
    held = {held.name: held for own in shares(tensors, world) for held in own.held}
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for name, (_, _, layout) in tensors.items():
        if layout.replica_count > 1:
            groups[layout.mesh, layout.replica_axes].append(name)
    for names in groups.values():
        loads = [0] * tensors[names[0]][2].replica_count
        largest = 0
        for name in names:
            dtype, shape, layout = tensors[name]
            as_written = held[name].layout
            piece = bytes_of(dtype, as_written.largest_box(shape).shape)
            parts = layout.replica_count // as_written.replica_count
            largest = max(largest, piece)
            for replica in range(parts):
                loads[held[name].writer * parts + replica] += piece
        assert max(loads) <= sum(loads) / len(loads) + largest


@pytest.mark.thorough
@given(states())
def test_a_record_accepts_what_a_rank_writes(state: tuple[Tensors, int]) -> None:
    """The reader of records works out on its own which boxes a rank must have written."""
    tensors, world = state
    for rank, own in enumerate(shares(tensors, world)):
        plan = plan_save(own.parts.specs, step=7, world_size=world, rank=rank)
        file, entries = record_file(plan, sums_for(plan))
        record = Record(
            step=7,
            world_size=world,
            rank=rank,
            attempt="01234567-0",
            block_bytes=BLOCK_BYTES,
            files=(file,),
            held=own.held,
            chunks={name: entry.chunks for name, entry in entries.items()},
            state={held.name: {"$tensor": held.name} for held in own.held},
        )
        assert set(Record.decode(record.encode(), "record").held) == set(own.held)
