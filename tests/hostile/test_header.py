"""safetensors headers that lie: each is refused with HeaderError and facts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from statehold.encoding import header
from statehold.errors import HeaderError
from support.lies import refused_as
from support.steps import header_of

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
    "c": {"dtype": "F32", "shape": [0], "data_offsets": [25, 25]},
}
DATA_BYTES = 25


def refused(raw: bytes, file_bytes: int | None = None) -> HeaderError:
    size = len(raw) + DATA_BYTES if file_bytes is None else file_bytes
    file = "run/x.safetensors"
    return refused_as(HeaderError, file, lambda: header.decode(raw, size, file))


def with_a(**members: Any) -> bytes:
    return header_of({**GOOD, "a": {**GOOD["a"], **members}})


def test_the_untouched_header_is_accepted() -> None:
    raw = header_of(GOOD)
    entries, metadata, data_begin = header.decode(raw, len(raw) + DATA_BYTES, "f")
    assert [entry.name for entry in entries] == ["a", "b", "c"]
    assert (metadata, data_begin) == ({"format": "pt"}, len(raw))


@pytest.mark.parametrize("size", range(8))
def test_no_room_for_a_length(size: int) -> None:
    refused(bytes(size), size)


@pytest.mark.parametrize("length", [0, 1, 90, 2**31, 2**63, 2**64 - 1, 100_000_001])
def test_lengths(length: int) -> None:
    raw = length.to_bytes(8, "little") + b"{}" + b" " * 60
    assert refused(raw, len(raw)).facts["where"] == "header length"


def test_a_length_beyond_the_limit_in_a_file_that_is_large_enough() -> None:
    raw = (100_000_001).to_bytes(8, "little") + b"{}"
    refused(raw, 2**40)


def test_less_than_the_header_was_read() -> None:
    raw = header_of(GOOD)
    for size in range(8, len(raw), 7):
        refused(raw[:size], len(raw) + DATA_BYTES)


@pytest.mark.parametrize(
    "text",
    [
        b" {}",
        b"[]",
        b"{",
        b"{}}",
        b"{}\0",
        b"{} x",
        b"\xff{}",
        b'{"a":\xff}',
        b'{"__metadata__":{"a":"b","a":"c"}}',
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"a":NaN}}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_texts(text: bytes) -> None:
    refused(header_of(text), len(text) + 8)


def test_a_name_twice() -> None:
    text = json.dumps(GOOD)[:-1] + ',"a":' + json.dumps(GOOD["a"]) + "}"
    assert "twice" in refused(header_of(text)).facts["got"]


@pytest.mark.parametrize("metadata", [None, [], "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata(metadata: Any) -> None:
    refused(header_of({**GOOD, "__metadata__": metadata}))


@pytest.mark.parametrize("dtype", [None, 1, True, "", "f32", "F32 ", "F128", ["F32"], "F64", "U8"])
def test_dtypes(dtype: Any) -> None:
    refused(with_a(dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [
        None,
        6,
        "23",
        {},
        [6.0],
        [True, 6],
        ["2", 3],
        [-2, -3],
        [2, 3, 2],
        [],
        [2**63],
        [2**62, 2**62],
        [2**32, 2**32],
        [2**64 + 6],
        [[2, 3]],
    ],
)
def test_shapes(shape: Any) -> None:
    # An array in a shape already nests deeper than any header.
    assert refused(with_a(shape=shape)).facts["where"].startswith(("a.", "header"))


@pytest.mark.parametrize(
    "offsets",
    [
        None,
        24,
        {},
        [],
        [0],
        [0, 24, 24],
        [0.0, 24],
        [False, 24],
        [24, 0],
        [-24, 0],
        [0, 23],
        [0, 25],
        [1, 25],
        [2**62, 2**62 + 24],
        [2**63, 2**63 + 24],
        ["0", "24"],
    ],
)
def test_offsets(offsets: Any) -> None:
    refused(with_a(data_offsets=offsets))


def test_members() -> None:
    for name in GOOD["a"]:
        rest = {key: value for key, value in GOOD["a"].items() if key != name}
        refused(header_of({**GOOD, "a": rest}))
    refused(with_a(more=1))
    not_objects: list[Any] = [None, [], "x", 1]
    for value in not_objects:
        refused(header_of({**GOOD, "a": value}))


def test_holes_overlaps_and_tails() -> None:
    def tensors(*ranges: tuple[int, int]) -> bytes:
        return header_of(
            {
                f"t{i}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
                for i, (begin, end) in enumerate(ranges)
            }
        )

    assert "a hole" in refused(tensors((1, 25))).facts["got"]
    assert "a hole" in refused(tensors((0, 5), (6, 25))).facts["got"]
    assert "an overlap" in refused(tensors((0, 5), (4, 25))).facts["got"]
    assert "an overlap" in refused(tensors((0, 25), (0, 25))).facts["got"]
    assert refused(tensors((0, 24))).facts["got"] == "25 bytes"
    assert refused(tensors((0, 26))).facts["got"] == "25 bytes"
    assert refused(tensors()).facts["expected"].startswith("0 bytes")


def test_sub_byte_tensors_are_whole_bytes() -> None:
    for dtype, count in [("F4", 3), ("F6_E2M3", 2)]:
        entry = {"dtype": dtype, "shape": [count], "data_offsets": [0, 1]}
        assert "whole number" in refused(header_of({"a": entry})).facts["expected"]


@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_deep_nesting(bracket: bytes) -> None:
    begin = time.process_time()
    error = refused(header_of(b'{"a":' + bracket * 2_000_000))
    assert "levels" in error.facts["got"]
    assert time.process_time() - begin < 10


def test_numbers_without_end() -> None:
    text = b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,1]}}'
    refused(header_of(text))


def test_a_shape_of_a_million_sizes() -> None:
    begin = time.process_time()
    refused(with_a(shape=[2**62] * 1_000_000))
    assert time.process_time() - begin < 10


def test_stock_safetensors_refuses_what_we_refuse(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    for raw in (with_a(shape=[2, 4]), with_a(data_offsets=[1, 25]), with_a(dtype="X"), b"\0" * 9):
        path.write_bytes(raw + bytes(DATA_BYTES))
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(path, "np").__enter__()
