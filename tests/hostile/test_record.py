"""Records that lie, correctly sealed: each is refused, by name, in bounded time and memory."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from statehold.errors import FormatVersionError, ManifestError
from statehold.format.record import MESH_RANKS_MAX, VERSION, Record
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
from support.records import example
from support.steps import changed, document_of, seal

RAW = example().records[0].encode()
DOCUMENT = document_of(RAW, "record")
FILE = ("files", 0)
SHARDED, UNEVEN = ("tensors", "sharded"), ("tensors", "uneven")
FREE, REPLICATED, OWN = ("tensors", "free"), ("tensors", "replicated"), ("tensors", "own")
CHUNK, BOX = (*SHARDED, "chunks", 0), (*FREE, "layout", "boxes", 0)
LAYOUT = (*SHARDED, "layout")


def refused(document: Any) -> ManifestError:
    raw, file = seal(document, "record"), "run/rank-00000-of-00004.json"
    return refused_as(ManifestError, file, lambda: Record.decode(raw, file))


def test_the_untouched_document_is_accepted() -> None:
    assert seal(DOCUMENT, "record") == RAW
    assert Record.decode(RAW, "r").encode() == RAW


def cases() -> Cases:
    hexes = ["", "0" * 15, "0" * 17, "G" * 16, "0" * 32]
    integers: Cases = [
        (("version",), [*NOT_INTEGERS[:-2], 0]),
        (("step",), [*NOT_INTEGERS, 10**12]),
        (("world_size",), [*NOT_INTEGERS, 0, 1, 2, 3, 5, 100_000]),
        (("rank",), [*NOT_INTEGERS, 1, 3, 4]),
        (("block_bytes",), [*NOT_INTEGERS, 0, 2048, 1048577, 1 << 25]),
        ((*FILE, "bytes"), [*NOT_INTEGERS, 0, 4096, 2**62]),
        ((*FILE, "data_begin"), [*NOT_INTEGERS, 0, 4095, 8192]),
        ((*CHUNK, "file"), [*NOT_INTEGERS, 1, 2]),
        ((*CHUNK, "begin"), [*NOT_INTEGERS, 0, 2**62]),
        ((*CHUNK, "end"), [*NOT_INTEGERS, 0, 2**62]),
        ((*LAYOUT, "mesh"), [*NOT_INTEGERS, 2]),
        ((*SHARDED, "writer"), [*NOT_INTEGERS, 1]),
        ((*REPLICATED, "writer"), [*NOT_INTEGERS, 0, 4]),
        ((*FREE, "writer"), [*NOT_INTEGERS, 1]),
        ((*OWN, "writer"), [*NOT_INTEGERS, 1]),
        ((*BOX, "rank"), [*NOT_INTEGERS, 0, 4]),
    ]
    strings: Cases = [
        (("format",), [*NOT_STRINGS, "", "statehold"]),
        (("attempt",), [*NOT_STRINGS, "", "X", "a" * 65, "../a", "a\n"]),
        ((*FILE, "name"), [*NOT_STRINGS, *names()]),
        ((*FILE, "header_sums"), [*NOT_STRINGS, *hexes]),
        ((*FILE, "digest"), [*NOT_STRINGS, "", "0" * 64]),
        ((*SHARDED, "dtype"), [*NOT_STRINGS, "", "i64", "F32", "U8"]),
        ((*OWN, "content"), [*NOT_STRINGS, *hexes]),
        ((*CHUNK, "sums"), [*NOT_STRINGS, *hexes]),
    ]
    shapes = [*NOT_ARRAYS, [], [6], [6.0, 4], [True, 4], [-6, -4], [4, 6], [6, 4, 1], [2**64, 1]]
    containers: Cases = [
        ((*SHARDED, "shape"), [*shapes, [2] * 100, [1 << 62, 1 << 62]]),
        ((*CHUNK, "shape"), [*NOT_ARRAYS, [], [3], [6, 4], [2, 3]]),
        ((*CHUNK, "offsets"), [*NOT_ARRAYS, [], [0], [0, 2], [3, 0], [False, 0]]),
        ((*SHARDED, "chunks"), [*NOT_ARRAYS, [], [None], [None, None]]),
        ((*REPLICATED, "chunks"), [*NOT_ARRAYS, [None], [DOCUMENT["tensors"]["own"]["chunks"][0]]]),
        ((*OWN, "chunks"), [*NOT_ARRAYS, [], [None]]),
        ((*FREE, "chunks"), [*NOT_ARRAYS, [], DOCUMENT["tensors"]["free"]["chunks"][:1]]),
        ((*FREE, "chunks"), [DOCUMENT["tensors"]["free"]["chunks"][::-1]]),
        (LAYOUT, [True, 3, "abc", [], {}, {"mesh": 0}, {"boxes": [], "mesh": 0}]),
        ((*LAYOUT, "splits"), [*NOT_ARRAYS, [None], [[0]], [[0, 0, 0]], [[0, 2]], [[2, 0]]]),
        ((*LAYOUT, "splits"), [[[0, 0], [0, 1]], [], [[True, 0]], [[0, -1]]]),
        ((*FREE, "layout", "boxes"), [*NOT_ARRAYS, [], [None]]),
        ((*BOX, "offsets"), [*NOT_ARRAYS, [], [-1], [6], [0, 0], [2**62]]),
        ((*BOX, "shape"), [*NOT_ARRAYS, [], [9], [3, 1], [2**62]]),
        (("meshes",), [*NOT_ARRAYS, [], [None]]),
        *mesh_cases(),
        *[((*place,), NOT_OBJECTS) for place in (CHUNK, SHARDED, FILE, BOX, ("meshes", 0))],
        (("tensors",), [*NOT_OBJECTS, {}]),
        (("files",), [*NOT_ARRAYS, [], [None]]),
        (("state",), [*NOT_OBJECTS, {"$tuple": []}, {"$tensor": "own"}, {"a": {"$tensor": "b"}}]),
    ]
    return integers + strings + containers


def names() -> list[str]:
    stem = "rank-00000-of-00004"
    bad = ["", ".", "..", "/etc/passwd", f"../{stem}.safetensors", f"{stem}.safetensors\n"]
    bad += [f"{stem}-0.safetensors", f"{stem}-01.safetensors", f"{stem}-1/x.safetensors"]
    bad += [f"{stem}-1.safetensors", f"{stem}--2.safetensors", f"{stem}.json", "x" * 100_000]
    return [*bad, "rank-00001-of-00004.safetensors", "rank-00000-of-00005.safetensors"]


def mesh_cases() -> Cases:
    affine = ("meshes", 0, "ranks")
    listed = ("meshes", 1, "ranks")
    return [
        (("meshes", 0, "shape"), [*NOT_ARRAYS, [], [2], [5], [0], [2, 0], [2, 2, 2], [2**62, 2]]),
        (("meshes", 0, "shape"), [[1] * 33, [2] * 40, [3, 2], [4]]),
        (affine, [None, True, 3, "abc", {}, [], [0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]]),
        ((*affine, "first"), [*NOT_INTEGERS, 1, 4]),
        ((*affine, "strides"), [*NOT_ARRAYS, [], [2], [0, 1], [1, 1], [2, 2], [3, 1], [-2, 1]]),
        ((*affine, "strides"), [[2, 1, 0], [2**62, 2**62]]),
        (listed, [[3, 1, 0, 3], [1, 2, 3], [True, 1, 2, 3], [3, 1, 0, -2], [3, 1, 0, 4]]),
    ]


@pytest.mark.thorough
@each_wrong(cases())
def test_every_member(where: Where, value: Any) -> None:
    refused(changed(DOCUMENT, where, value))


@pytest.mark.parametrize(
    "where",
    [(), FILE, SHARDED, FREE, CHUNK, BOX, LAYOUT, ("meshes", 0), ("meshes", 0, "ranks")],
    ids=str,
)
def test_members_are_neither_missing_nor_unknown(where: Where) -> None:
    for wrong in missing_and_unknown(DOCUMENT, where):
        refused(wrong)


def test_a_record_of_a_newer_version() -> None:
    with pytest.raises(FormatVersionError):
        Record.decode(seal(changed(DOCUMENT, ("version",), VERSION + 1), "record"), "r")


def test_a_mesh_without_this_rank() -> None:
    document = changed(DOCUMENT, ("meshes", 0), {"shape": [2, 1], "ranks": [1, 2]})
    assert refused(document).facts["where"] == "tensors.sharded.layout.mesh"


def test_two_chunks_of_a_tensor_in_one_file() -> None:
    document = changed(DOCUMENT, (*FREE, "chunks", 1, "file"), 0)
    assert refused(document).facts["where"].startswith("tensors.free.chunks")


def test_a_tensor_of_bits_cut_inside_a_byte() -> None:
    box = {"offsets": [0], "shape": [1], "rank": 0}
    rest = {"offsets": [1], "shape": [3], "rank": 1}
    chunk = {"offsets": [0], "shape": [1], "file": 0, "begin": 4096, "end": 4096, "sums": ""}
    tensor = {"dtype": "F4", "shape": [4], "layout": {"boxes": [box, rest]}, "writer": 0}
    tensors = {"bits": {**tensor, "chunks": [chunk]}, **DOCUMENT["tensors"]}
    error = refused(changed(DOCUMENT, ("tensors",), tensors))
    assert error.facts["where"] == "tensors.bits.chunks[0].shape"


@pytest.mark.parametrize("name", ["", "__metadata__", "\ud800"])
def test_tensor_names(name: str) -> None:
    tensors = {**DOCUMENT["tensors"], name: DOCUMENT["tensors"]["own"]}
    refused(changed(DOCUMENT, ("tensors",), tensors))


def test_every_bit_and_every_truncation_count() -> None:
    for at in range(0, len(RAW), 7):
        damaged = bytearray(RAW)
        damaged[at] ^= 1 << at % 8
        for raw in (bytes(damaged), RAW[:at]):
            with pytest.raises(ManifestError):
                Record.decode(raw, "r")


@pytest.mark.parametrize(
    "mesh",
    [
        {"shape": [2**40], "ranks": {"first": 0, "strides": [0]}},
        {"shape": [2] * 32, "ranks": {"first": 0, "strides": [0] * 32}},
        {"shape": [10**9, 10**9, 10**9], "ranks": {"first": 0, "strides": [0] * 3}},
        {"shape": [100_000], "ranks": {"first": 0, "strides": [1]}},
    ],
    ids=["long", "deep", "beyond 64 bits", "one too many"],
)
def test_a_mesh_that_promises_too_much(mesh: Any) -> None:
    document = changed(DOCUMENT, ("meshes",), [mesh])
    tracemalloc.start()
    begin = time.process_time()
    refused(changed(document, ("world_size",), 99_999))
    refused(document)
    assert time.process_time() - begin < 2
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_many_meshes_that_promise_much() -> None:
    mesh = {"shape": [99_999], "ranks": {"first": 0, "strides": [1]}}
    count = MESH_RANKS_MAX // 99_999 + 1
    document = changed(DOCUMENT, ("meshes",), [mesh] * 10_000)
    document = changed(document, ("world_size",), 99_999)
    file = "rank-00000-of-99999.safetensors"
    document = changed(document, (*FILE, "name"), file)
    document = changed(document, ("files", 1, "name"), file.replace(".s", "-1.s"))
    assert refused(document).facts["where"] == f"meshes[{count - 1}].shape"
