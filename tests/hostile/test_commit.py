"""Manifests of version 2 that lie, and steps whose parts do not belong together."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from statehold.errors import (
    CorruptionError,
    FormatVersionError,
    ManifestError,
    MissingFileError,
    StateMismatchError,
)
from statehold.format.manifest import VERSION, Commit, Manifest, RecordEntry, Shared
from statehold.format.record import Record
from statehold.format.saved import _check_cover
from statehold.layout.layout import Box, ExplicitLayout, Layout, Mesh, Ranks
from statehold.layout.plan import SavePlan
from statehold.layout.share import HeldTensor
from support.lies import (
    NOT_ARRAYS,
    NOT_INTEGERS,
    NOT_OBJECTS,
    NOT_STRINGS,
    Cases,
    Where,
    each_wrong,
    missing_and_unknown,
    refused_as,
)
from support.records import DIRECTORY, World, example
from support.steps import Sums, changed, document_of, false_sums, seal, true_sums

WORLD = example()
COMMIT = replace(WORLD.commit, shared=(Shared(Ranks(((0, 1), (3, 3))), ("own",)),))
RAW = COMMIT.encode()
DOCUMENT = document_of(RAW)
RANKS: list[Any] = [*NOT_ARRAYS, [], [None], [[0]], [[0, 1, 2]], [[1, 0]], [[0, 4]], [[-1, 0]]]
RANKS += [[[2, 2], [0, 0]], [[0, 0], [1, 1]], [[0, 1], [1, 2]], [[True, 1]], [[0.0, 1]]]


def refused(document: Any) -> ManifestError:
    raw, file = seal(document), "run/manifest.json"
    return refused_as(ManifestError, file, lambda: Manifest.decode(raw, file))


def cases() -> Cases:
    record: tuple[str | int, ...] = ("records", 1)
    own_name = DOCUMENT["records"][0]["name"]
    return [
        (("version",), [*NOT_INTEGERS[:-2], 0, 1]),
        (("step",), [*NOT_INTEGERS, 10**12]),
        (("world_size",), [*NOT_INTEGERS, 0, 3, 5, 100_000]),
        (("format",), [*NOT_STRINGS, "", "statehold-record"]),
        (("created",), [*NOT_STRINGS, "", "yesterday"]),
        (("writer",), [*NOT_STRINGS, "", "x" * 201]),
        (("checksum",), [*NOT_STRINGS, "", "crc32"]),
        (("attempt",), [*NOT_STRINGS, "", "G", "a" * 65, "..", "a/b"]),
        (("records",), [*NOT_ARRAYS, [], [None], DOCUMENT["records"][:3]]),
        (record, NOT_OBJECTS),
        ((*record, "name"), [*NOT_STRINGS, "", "../x", "/etc/passwd", own_name, f"{own_name}\n"]),
        ((*record, "bytes"), [*NOT_INTEGERS, 0, (1 << 30) + 1]),
        ((*record, "sha256"), [*NOT_STRINGS, "", "0" * 63, "F" * 64]),
        (("state",), NOT_OBJECTS),
        (("state", "model"), [*NOT_ARRAYS, [], [None], [[[0, 1]], [[1, 3]]], [[[0, 3]]] * 2]),
        (("state", "model", 0), RANKS),
        (("shared",), [*NOT_ARRAYS, [None]]),
        (("shared", 0), NOT_OBJECTS),
        (("shared", 0, "ranks"), RANKS),
        (("shared", 0, "names"), [*NOT_ARRAYS, [1], [["a"]], ["a", "a"], [None, None]]),
    ]


@pytest.mark.thorough
@each_wrong(cases())
def test_every_member(where: Where, value: Any) -> None:
    refused(changed(DOCUMENT, where, value))


@pytest.mark.parametrize("where", [(), ("records", 0), ("shared", 0)], ids=str)
def test_members_are_neither_missing_nor_unknown(where: Where) -> None:
    for wrong in missing_and_unknown(DOCUMENT, where):
        refused(wrong)


def test_the_untouched_document_is_accepted() -> None:
    assert Manifest.decode(RAW, "m") == COMMIT
    assert seal(DOCUMENT) == RAW


def test_a_newer_version() -> None:
    with pytest.raises(FormatVersionError):
        Manifest.decode(seal(changed(DOCUMENT, ("version",), VERSION + 1)), "m")


# -- records that do not belong ---------------------------------------------------------------


def path_of(rank: int) -> str:
    return f"{DIRECTORY}/rank-{rank:05d}-of-00004.json"


def damaged(world: World, rank: int) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        world.open(rank, 4)
    assert caught.value.facts["file"] == path_of(rank)
    return caught.value


def test_a_record_with_other_bytes() -> None:
    world = example()
    for raw in (world.files[path_of(1)][:-1], world.files[path_of(2)], b""):
        world.files[path_of(1)] = raw
        assert "sha256" in damaged(world, 1).facts["expected"]
    world.open(0, 4)  # which does not need it


def test_a_record_that_is_not_there() -> None:
    world = example()
    del world.files[path_of(1)]
    with pytest.raises(MissingFileError) as caught:
        world.open(1, 4)
    assert caught.value.facts["file"] == path_of(1)


def test_a_manifest_that_is_not_there() -> None:
    world = example()
    del world.files[f"{DIRECTORY}/manifest.json"]
    with pytest.raises(MissingFileError):
        world.open(1, 4)


def recommitted(change: Callable[[Record], Record], rank: int) -> World:
    """The example with another record of `rank`, which the manifest vouches for."""
    world = example()
    raw = change(world.records[rank]).encode()
    world.files[path_of(rank)] = raw
    entries = list(world.commit.records)
    digest = hashlib.sha256(raw).hexdigest()
    entries[rank] = RecordEntry(entries[rank].name, len(raw), digest)
    manifest = replace(world.commit, records=tuple(entries))
    world.files[f"{DIRECTORY}/manifest.json"] = manifest.encode()
    return world


@pytest.mark.parametrize("change", [{"step": 8}, {"attempt": "5eed-2"}])
def test_a_record_of_something_else(change: dict[str, Any]) -> None:
    world = recommitted(lambda record: replace(record, **change), 1)
    assert next(iter(change)) in damaged(world, 1).facts["expected"]


def test_a_record_of_another_rank() -> None:
    world = recommitted(lambda _: example().records[2], 1)
    assert damaged(world, 1).facts["got"] == "2"


def test_a_manifest_of_another_step() -> None:
    world = example()
    world.files[f"{DIRECTORY}/manifest.json"] = replace(world.commit, step=8).encode()
    with pytest.raises(ManifestError, match="another step"):
        world.open(0, 4)


def test_records_with_other_grids() -> None:
    own = HeldTensor("own", "I64", (0,), None)
    other = {"files": (), "held": (own,), "chunks": {}, "state": {}, "block_bytes": 4096}
    world = recommitted(lambda record: replace(record, **other), 1)
    step = world.open(0, 4)
    with pytest.raises(ManifestError) as caught:
        step.chunks("uneven", Box.whole((5,)))
    assert caught.value.facts["file"] == path_of(1)
    assert caught.value.facts["expected"] == "block_bytes 1048576"


def test_records_that_disagree_about_a_tensor() -> None:
    def change(record: Record) -> Record:
        held = tuple(
            each._replace(shape=(6,)) if each.name == "uneven" else each for each in record.held
        )
        return replace(record, held=held)

    world = recommitted(change, 3)  # its box [0:2) is the same in five elements and in six
    with pytest.raises(ManifestError) as caught:
        world.open(0, 4).chunks("uneven", Box.whole((5,)))
    assert caught.value.facts["file"] == path_of(3)
    assert "uneven: I16 [5] split [(0, 0)] over [4] ranks" in caught.value.facts["expected"]


def test_a_record_without_what_its_group_has() -> None:
    def change(record: Record) -> Record:
        return replace(record, state={"model": record.state["model"]})

    world = recommitted(change, 1)
    with pytest.raises(ManifestError) as caught:
        _ = world.open(1, 4).state
    assert "epoch" in caught.value.facts["expected"]


# -- boxes that do not cover ------------------------------------------------------------------


def free(*boxes: tuple[int, int]) -> World:
    placed = tuple((Box((begin,), (end - begin,)), i % 2) for i, (begin, end) in enumerate(boxes))
    held = HeldTensor("free", "U8", (10,), ExplicitLayout(placed))
    return World([[held]] * 2, {"free": np.arange(10, dtype=np.uint8)})


@pytest.mark.parametrize(
    ("boxes", "missing"),
    [
        ([(0, 4), (5, 10)], "[4:5]"),
        ([(0, 4)], "[4:10]"),
        ([], "[0:10]"),
        ([(0, 6), (5, 10)], "nothing, but chunks overlap"),
        ([(0, 4), (3, 6), (7, 10)], "[6:7]"),  # as many elements as there should be
    ],
)
def test_chunks_that_do_not_cover(boxes: list[tuple[int, int]], missing: str) -> None:
    step = free(*boxes).open(0, 2)
    with pytest.raises(CorruptionError) as caught:
        step.chunks("free", Box.whole((10,)))
    assert caught.value.facts["tensor"] == "free"
    assert caught.value.facts["box"] == "[0:10]"
    assert caught.value.facts["missing"] == missing
    if boxes:
        assert step.chunks("free", Box((1,), (2,)))  # what is there can be had


# -- which version ----------------------------------------------------------------------------


def locals_of(values: Sequence[int], shared: Sequence[Shared] = ()) -> World:
    held = HeldTensor("own", "I64", (1,), None)
    own = [{"own": np.array([value])} for value in values]
    return World([[held]] * len(values), {}, own, shared=shared, sums=true_sums)


def test_tensors_of_ranks_alone() -> None:
    world = locals_of([5, 6, 7])
    for rank in range(3):
        step = world.open(rank, 3)
        assert world.assemble(step, "own", Box.whole((1,)))[0] == 5 + rank
        assert len(step.files) == 1
    with pytest.raises(StateMismatchError) as caught:
        world.open(0, 2).chunks("own", Box.whole((1,)))
    assert caught.value.facts["tensor"] == "own"
    assert "I64 [1] of one rank alone" in caught.value.facts["ranks 0-2"]


def test_equals_are_shared() -> None:
    world = locals_of([5, 5, 5], [Shared(Ranks(((0, 2),)), ("own",))])
    assert world.assemble(world.open(1, 7), "own", Box.whole((1,)))[0] == 5
    world = locals_of([5, 5, 6], [Shared(Ranks(((0, 1),)), ("own",))])
    with pytest.raises(StateMismatchError):
        world.open(1, 7).chunks("own", Box.whole((1,)))


def test_two_layouts_of_one_name() -> None:
    number = itertools.count(1)

    def other_sums(plan: SavePlan, content: bytes) -> bytes:
        return next(number).to_bytes(8, "little") * (len(false_sums(plan, content)) // 8)

    def world(*shared: Shared, sums: Sums = other_sums) -> World:
        held = [
            [HeldTensor("w", "I64", (4,), Layout(Mesh((2,), mesh), ((0, 0),)))]
            for mesh in ((0, 1), (0, 1), (2, 3), (2, 3))
        ]
        return World(held, {"w": np.arange(4)}, shared=shared, sums=sums)

    for rank in range(4):
        step = world().open(rank, 4)
        assert list(world().assemble(step, "w", Box.whole((4,)))) == [0, 1, 2, 3]
    with pytest.raises(StateMismatchError) as caught:
        world().open(0, 3).chunks("w", Box.whole((4,)))
    assert {"tensor", "ranks 0-1", "ranks 2-3"} == set(caught.value.facts)
    for one in (world(Shared(Ranks(((0, 3),)), ("w",))), world(sums=true_sums)):
        assert list(one.assemble(one.open(0, 3), "w", Box.whole((4,)))) == [0, 1, 2, 3]


def test_commits_are_typed() -> None:
    assert isinstance(Manifest.decode(RAW, "m"), Commit)


def test_many_boxes_in_the_worst_order() -> None:
    count = 4000
    boxes = [(Box((at,), (1,)), 0) for at in range(count)]
    placed = tuple(boxes[::2] + boxes[1::2])
    held = HeldTensor("free", "U8", (count,), ExplicitLayout(placed))
    cut = [each for each, _ in placed]
    begin = time.process_time()
    _check_cover(held.name, Box.whole(held.shape), cut, disjoint=False)
    with pytest.raises(CorruptionError, match="do not cover"):
        _check_cover(held.name, Box.whole(held.shape), [*cut[1:], cut[1]], disjoint=False)
    assert time.process_time() - begin < 5  # 50 ms where this was written
