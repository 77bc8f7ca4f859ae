"""Manifests that lie, correctly sealed: each is refused, by name, in bounded time and memory.

Whoever can write a manifest can also compute its hash, so the seal protects against damage only.
Everything below has a valid seal.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from statehold.encoding import strictjson
from statehold.encoding.strictjson import measured
from statehold.errors import FormatVersionError, InvariantError, ManifestError
from statehold.format import entries
from statehold.format.manifest import Manifest
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
from support.steps import changed, document_of, manifest_of, seal

DOCUMENT = document_of(manifest_of().encode())
FILE = ("files", 0)
TENSOR = ("tensors", "model.weight")
CHUNK = (*TENSOR, "chunks", 0)
LARGE = ("tensors", "large", "chunks", 0)


# Values that are valid where they stand, and contradict another member, which is then named.
CONTRADICTIONS = {
    ("world_size", "2"): "files[0].name",
    ("block_bytes", str(1 << 19)): "tensors.large.chunks[0].sums",
    ("files[0].bytes", "4096"): "tensors.scalar.chunks[0].end",
    ("files[0].data_begin", "8192"): "tensors.scalar.chunks[0].begin",
    ("tensors.model.weight.chunks[0].begin", "4096"): "tensors.model.weight.chunks[0].end",
    ("tensors.model.weight.chunks[0].begin", "4125"): "tensors.model.weight.chunks[0].end",
    ("tensors.large.chunks[0].begin", "4147"): "tensors.large.chunks[0].end",
    ("tensors.model.weight.dtype", "F32"): "tensors.model.weight.chunks[0].end",
    ("tensors.model.weight.dtype", "U8"): "tensors.model.weight.chunks[0].end",
    ("tensors.model.weight.chunks[0].sums", "0" * 16): "files[0].digest",
    ("tensors.model.weight.shape", "[]"): "tensors.model.weight.chunks[0].offsets",
    ("tensors.model.weight.shape", "[12]"): "tensors.model.weight.chunks[0].offsets",
    ("tensors.model.weight.shape", "[4, 3, 1]"): "tensors.model.weight.chunks[0].offsets",
    ("tensors", "{}"): "files[0].bytes",
    ("files", "[]"): "tensors.scalar.chunks[0].file",
}


def refused(raw: bytes) -> ManifestError:
    file = "run/step-000000000007/manifest.json"
    return refused_as(ManifestError, file, lambda: Manifest.decode(raw, file))


def test_the_untouched_document_is_accepted() -> None:
    found = Manifest.decode(seal(DOCUMENT), "m")
    assert document_of(found.encode()) == DOCUMENT


def cases() -> Cases:
    integers: Cases = [
        (("version",), [*NOT_INTEGERS[:-2], 0]),
        (("step",), [*NOT_INTEGERS, 10**12]),
        (("world_size",), [*NOT_INTEGERS, 0, 2, 100_000]),
        (("block_bytes",), [*NOT_INTEGERS, 0, 1, 2048, 1048577, 3 << 20, 1 << 25, 1 << 19]),
        ((*FILE, "bytes"), [*NOT_INTEGERS, 0, 4096, 2**62]),
        ((*FILE, "data_begin"), [*NOT_INTEGERS, 0, 4095, 4097, 8192, 1 << 27]),
        ((*CHUNK, "file"), [*NOT_INTEGERS, 1]),
        ((*CHUNK, "begin"), [*NOT_INTEGERS, 0, 4096, 4125, 2**62]),
        ((*CHUNK, "end"), [*NOT_INTEGERS, 0, 4124, 4149, 2**62]),
        ((*LARGE, "begin"), [*NOT_INTEGERS, 4147]),
    ]
    hexes = ["", "0" * 15, "0" * 17, "G" * 16, "0" * 32, "ABCDEF0123456789", "\u0660" * 16]
    strings: Cases = [
        (("format",), [*NOT_STRINGS, "", "Statehold", "torch"]),
        (("created",), [*NOT_STRINGS, "", "yesterday", "2026-11-21T07:00:00+01:00"]),
        (("writer",), [*NOT_STRINGS, "", "x" * 201, "a\nb", "\x1b[31m"]),
        (("checksum",), [*NOT_STRINGS, "", "crc32", "XXH3-64"]),
        ((*FILE, "header_sums"), [*NOT_STRINGS, *hexes]),
        ((*FILE, "digest"), [*NOT_STRINGS, "", "0" * 63, "0" * 64, "F" * 64]),
        ((*TENSOR, "dtype"), [*NOT_STRINGS, "", "bf16", "F32", "U8", "F128", "BF16 "]),
        ((*CHUNK, "sums"), [*NOT_STRINGS, *hexes, "0" * 16]),
    ]
    shapes = [*NOT_ARRAYS, [], [12], [3.0, 4], [True, 4], [-3, -4], [4, 3, 1], [2**64], [[3, 4]]]
    containers: Cases = [
        ((*TENSOR, "shape"), [*shapes, [2] * 100, [1 << 62, 1 << 62]]),
        ((*CHUNK, "shape"), shapes),
        ((*CHUNK, "offsets"), [*NOT_ARRAYS, [], [0], [0, 0, 0], [0, 1], [False, 0], [0.0, 0]]),
        ((*TENSOR, "chunks"), [*NOT_ARRAYS, [], [None]]),
        (CHUNK, NOT_OBJECTS),
        (TENSOR, NOT_OBJECTS),
        (("tensors",), [*NOT_OBJECTS, {}]),
        (("files",), [*NOT_ARRAYS, [], [None]]),
        (FILE, NOT_OBJECTS),
    ]
    return integers + strings + containers


@pytest.mark.thorough
@each_wrong(cases())
def test_every_member(where: Where, value: Any) -> None:
    error = refused(seal(changed(DOCUMENT, where, value)))
    place = "".join(f"[{key}]" if type(key) is int else f".{key}" for key in where)[1:]
    blamed = CONTRADICTIONS.get((place, str(value)), place)
    assert error.facts["where"].startswith(blamed)


def test_a_version_from_the_far_future() -> None:
    with pytest.raises(FormatVersionError):
        Manifest.decode(seal(changed(DOCUMENT, ("version",), 2**63 - 1)), "m")


@pytest.mark.parametrize("where", [(), FILE, TENSOR, CHUNK], ids=["top", "file", "tensor", "chunk"])
def test_members_are_neither_missing_nor_unknown(where: Where) -> None:
    for wrong in missing_and_unknown(DOCUMENT, where):
        refused(seal(wrong))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../rank-00000-of-00001.safetensors",
        "/etc/passwd",
        "a/rank-00000-of-00001.safetensors",
        "rank-00000-of-00001.safetensors/../../x",
        "rank-00000-of-00001.safetensors\0",
        "rank-00000-of-00001.safetensors\n",
        "rank-00000-of-00001.safetensor",
        "rank-00001-of-00001.safetensors",
        "rank-00000-of-00002.safetensors",
        "rank-0-of-1.safetensors",
        "rank-\u0660\u0660\u0660\u0660\u0660-of-00001.safetensors",
        "RANK-00000-of-00001.safetensors",
        "C:\\rank-00000-of-00001.safetensors",
        "manifest.json",
        "x" * 100_000,
    ],
)
def test_file_names_stay_in_the_step(name: str) -> None:
    error = refused(seal(changed(DOCUMENT, (*FILE, "name"), name)))
    assert error.facts["where"] == "files[0].name"


def test_a_file_twice() -> None:
    file = DOCUMENT["files"][0]
    error = refused(seal(changed(DOCUMENT, ("files",), [file, file])))
    assert "twice" in error.facts["got"]


@pytest.mark.parametrize("name", ["", "__metadata__", "\ud800"])
def test_tensor_names(name: str) -> None:
    tensors = {**DOCUMENT["tensors"], name: DOCUMENT["tensors"]["empty"]}
    refused(seal(changed(DOCUMENT, ("tensors",), tensors)))


def test_ranges_that_overlap_or_leave_holes() -> None:
    # Swap two tensors of different sizes without moving the others: both problems at once.
    for shift, problem in [(-4, "an overlap"), (4, "a hole")]:
        document = changed(
            DOCUMENT,
            (*CHUNK, "begin"),
            DOCUMENT["tensors"]["model.weight"]["chunks"][0]["begin"] + shift,
        )
        document = changed(
            document,
            (*CHUNK, "end"),
            document["tensors"]["model.weight"]["chunks"][0]["end"] + shift,
        )
        assert problem in refused(seal(document)).facts["got"]


def test_two_tensors_on_the_same_bytes() -> None:
    tensors = {**DOCUMENT["tensors"], "twin": DOCUMENT["tensors"]["model.weight"]}
    assert "an overlap" in refused(seal(changed(DOCUMENT, ("tensors",), tensors))).facts["got"]


def test_bytes_that_belong_to_no_tensor() -> None:
    tensors = {k: v for k, v in DOCUMENT["tensors"].items() if k != "large"}
    error = refused(seal(changed(DOCUMENT, ("tensors",), tensors)))
    assert error.facts["where"] == "files[0].bytes"


@pytest.mark.parametrize(
    "state",
    [
        {"$tensor": "no such tensor"},
        {"$ndarray": "no such tensor"},
        {"$tensor": ["model.weight"]},
        {"$tensor": "model.weight", "more": 1},
        {"$pickle": "gASV"},
        {"a": {"$bytes": "?"}},
        {"a": 2**70},
        "\ud800",
    ],
)
def test_states_that_cannot_be_decoded(state: Any) -> None:
    error = refused(seal(changed(DOCUMENT, ("state",), state)))
    assert error.facts["where"].startswith("state")


@pytest.mark.parametrize(
    "body",
    [
        "null,",
        "[1,2,",
        '"text",',
        "{,",
        "{'a':1,",
        '{"format":"statehold","format":"statehold",',
        '{"format":NaN,',
        '{"format":Infinity,',
        '{"a":\x01,',
        "\ud800{,",
        '{"step":' + "9" * 100_000 + ",",
    ],
)
def test_bodies_that_are_no_json_objects(body: str) -> None:
    refused(seal(body))


def test_a_key_twice_anywhere() -> None:
    text = manifest_of().encode().decode().split(',"manifest_sha256"')[0] + "}"
    for old, new in [
        ('"epoch":3', '"epoch":3,"epoch":4'),
        ('"step":7', '"step":7,"step":8'),
        ('"dtype":"BF16"', '"dtype":"BF16","dtype":"F16"'),
        ('"tensors":{', '"tensors":{"scalar":{},'),
    ]:
        assert text.count(old) == 1
        assert "twice" in refused(seal(text.replace(old, new))).facts["got"]


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [700, 100_000, 5_000_000])
def test_deep_nesting(bracket: str, levels: int) -> None:
    begin = time.process_time()
    error = refused(seal('{"state":' + bracket * levels + " "))
    assert "levels" in error.facts["got"]
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("each", ["[]", "{}", '{"a":0}', "[0]"])
def test_more_containers_than_any_step_has_are_refused_before_they_are_made(
    each: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 GiB of `{},` took 26 GiB of memory."""
    monkeypatch.setattr(strictjson, "CONTAINERS_MAX", 1000)
    made: list[object] = []
    monkeypatch.setattr(strictjson, "_unique", made.append)
    error = refused(seal('{"x":[' + ",".join([each] * 2000) + "]"))
    assert error.facts["expected"].startswith("at most 1")
    assert "arrays and objects" in error.facts["expected"]
    assert made == []


def test_a_state_with_more_containers_than_a_reader_takes_is_not_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strictjson, "CONTAINERS_MAX", 10)
    with pytest.raises(InvariantError, match="not committed"):
        entries.proven(
            entries.seal({"state": [[]] * 1000}, "manifest"), Manifest.decode, "manifest"
        )


def test_brackets_in_strings_do_not_nest() -> None:
    state = {"text": "[" * 10_000, '{"[\\': "\\" + '"[{' * 1000}
    document = changed(DOCUMENT, ("state",), state)
    assert measured(seal(document))[0] == measured(seal(DOCUMENT))[0] == 6
    Manifest.decode(seal(document), "m")


def test_a_promise_of_many_bytes_costs_nothing() -> None:
    """Sizes and counts are compared before anything is allocated by them."""
    document = changed(DOCUMENT, (*FILE, "bytes"), 2**62)
    raw = seal(changed(document, (*LARGE, "end"), 2**62))
    tracemalloc.start()
    begin = time.process_time()
    refused(raw)
    assert time.process_time() - begin < 1
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_shape_of_a_million_sizes() -> None:
    begin = time.process_time()
    refused(seal(changed(DOCUMENT, (*TENSOR, "shape"), [2**60] * 1_000_000)))
    assert time.process_time() - begin < 10
