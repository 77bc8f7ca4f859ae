"""The header of a safetensors file: bytes <-> entries.

Facts of the format: u64 little-endian N; N <= 100,000,000 bytes of JSON that begin with "{" and may
end in spaces; then the data, C order, little-endian. Sorted by offset, the tensors tile the data:
no hole, no overlap, nothing after the last one. `__metadata__` maps strings to strings.

Owns: the rules of the safetensors format, and the padding that starts the data on a page.
Invariants: `decode` and every stock reader accept the result of `encode`. `decode` refuses whatever
a stock reader refuses, and also unknown members, in time and memory linear in the header.
Not here: which tensor goes where (plan), checksums (manifest), the disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from statehold.encoding.strictjson import INT_MAX, Checker, show
from statehold.encoding.values import well_formed
from statehold.errors import HeaderError, InvariantError, UsageError

PAGE = 4096
HEADER_BYTES_MAX = 100_000_000
METADATA = "__metadata__"
LENGTH_BYTES = 8
# The header, its entry, its two arrays: nothing in a valid header nests deeper.
_DEPTH_MAX = 3

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_DTYPE = re.compile("|".join(DTYPE_BITS))
_ANY_TEXT = re.compile(r".*", re.DOTALL)


class Entry(NamedTuple):
    """One tensor: the bytes [begin, end) counted from the first byte of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def are_names(names: Sequence[str]) -> bool:
    """Whether the tensors of a file can have these names."""
    found = set(names)
    is_new = len(found) == len(names) and found.isdisjoint(("", METADATA))
    return is_new and well_formed("".join(names))


def bytes_of(dtype: str, shape: Sequence[int]) -> int | None:
    """The size of a tensor; None when it overflows 64 bits or is not a whole number of bytes."""
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        # Stop early: a hostile shape of a million sizes would be a million-digit product.
        if bits > INT_MAX:
            return None
    return None if bits % 8 else bits // 8


def members(names: Sequence[str], texts: Iterable[str]) -> str:
    """JSON of an object whose values are JSON already. It makes no object for each value: of the
    thousands of a header, Python's collector would go through all objects of the program."""
    return "{" + ",".join(map("{}:{}".format, _quoted(names), texts)) + "}"


def _quoted(texts: Sequence[str]) -> list[str]:
    """Each as JSON, which contains no newline, in one call."""
    text = json.dumps(texts, ensure_ascii=False, separators=("\n", ":"))[1:-1]
    return text.split("\n") if texts else []


@lru_cache(1 << 12)  # a state has few shapes
def sizes(values: tuple[int, ...]) -> str:
    """JSON of an array of integers."""
    return f"[{','.join(map(str, values))}]"


def encode(entries: Iterable[Entry], metadata: Mapping[str, str], least: int = 0) -> bytes:
    """The whole header: length, JSON, and the spaces that make its size a multiple of PAGE.

    `entries` are written in the order given, which must be the order of their bytes. least: the
    bytes that it has at least, a multiple of PAGE.
    """
    names, texts = [METADATA], [members([*metadata], _quoted([*metadata.values()]))]
    for name, dtype, shape, begin, end in entries:
        names.append(name)
        texts.append(f'{{"dtype":"{dtype}","shape":{sizes(shape)},"data_offsets":[{begin},{end}]}}')
    if len(set(names)) != len(names):
        raise InvariantError("a safetensors header would name a tensor twice")
    try:
        text = members(names, texts).encode("utf-8")
    except UnicodeEncodeError as fault:
        facts = {"got": ascii(fault)[:200]}
        raise InvariantError("a tensor name is not Unicode text", facts=facts) from fault
    size = max(least, -(-(LENGTH_BYTES + len(text)) // PAGE) * PAGE) - LENGTH_BYTES
    if size > HEADER_BYTES_MAX:
        facts = {"expected": f"at most {HEADER_BYTES_MAX} bytes", "got": f"{size} bytes"}
        hint = f"the {len(names) - 1} names and shapes fill it: save fewer, larger tensors"
        raise UsageError("a safetensors header would be too large to read", facts=facts, hint=hint)
    return size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)


def metadata_in(raw: bytes, key: str) -> str | None:
    """One string of the metadata of a verified header, without a look at its tensors; None where
    it is not there. No string can be mistaken for a key: its quotes are escaped."""
    marker = f'"{key}":'.encode()
    at = raw.find(marker + b'"')
    if at < 0:
        return None
    found, _ = json.JSONDecoder().raw_decode(raw[at + len(marker) :].decode("utf-8"))
    return str(found)


def decode(raw: bytes, file_bytes: int, path: str) -> tuple[list[Entry], dict[str, str], int]:
    """(entries in the order of their bytes, metadata, offset of the first byte of data).

    `raw` starts at the start of the file and holds at least the header; bytes after the header are
    ignored. `file_bytes` is the size of the file. Raises HeaderError.
    """
    check = Checker(HeaderError, "a safetensors header is not valid", path)
    length = _length(check, raw, file_bytes)
    data_begin = LENGTH_BYTES + length
    text = bytes(raw[LENGTH_BYTES:data_begin])
    if not text.startswith(b"{"):
        check.fail("header", "JSON that begins with {", show(text[:16]))
    document = check.object(check.parse(text, "header", _DEPTH_MAX), "header")
    metadata = _metadata(check, document.pop(METADATA, {}))
    entries = [_entry(check, name, members) for name, members in document.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_tiling(check, entries, file_bytes - data_begin)
    return entries, metadata, data_begin


def _length(check: Checker, raw: bytes, file_bytes: int) -> int:
    if len(raw) < LENGTH_BYTES:
        check.fail("header length", f"{LENGTH_BYTES} bytes", f"{len(raw)} bytes")
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    limit = min(HEADER_BYTES_MAX, file_bytes - LENGTH_BYTES)
    check.integer(length, "header length", low=2, high=limit)
    if len(raw) < LENGTH_BYTES + length:
        check.fail("header", f"{length} bytes", f"{len(raw) - LENGTH_BYTES} bytes")
    return length


def _metadata(check: Checker, members: Any) -> dict[str, str]:
    for key, value in check.object(members, METADATA).items():
        check.text(value, f"{METADATA}.{key}", _ANY_TEXT, "a string")
    return dict(members)


def _entry(check: Checker, name: str, members: Any) -> Entry:
    found = check.members(members, show(name), ("dtype", "shape", "data_offsets"))
    dtype = check.text(found["dtype"], f"{name}.dtype", _DTYPE, "a dtype of safetensors")
    shape = check.shape(found["shape"], f"{name}.shape")
    offsets = check.shape(found["data_offsets"], f"{name}.data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        check.fail(f"{name}.data_offsets", "[begin, end], begin <= end", show(offsets))
    begin, end = offsets
    nbytes = bytes_of(dtype, shape)
    if nbytes is None:
        expected = "a whole number of bytes below 2**60"
        check.fail(f"{name}.shape", expected, f"{dtype} {show(shape)}")
    if end - begin != nbytes:
        expected = f"{nbytes} bytes for {dtype} {show(shape)}"
        check.fail(f"{name}.data_offsets", expected, f"{end - begin} bytes: [{begin}, {end})")
    return Entry(name, dtype, shape, begin, end)


def _check_tiling(check: Checker, entries: Sequence[Entry], data_bytes: int) -> None:
    """`entries`, sorted, cover [0, data_bytes) exactly once."""
    at = 0
    for entry in entries:
        if entry.begin != at:
            problem = "a hole" if entry.begin > at else "an overlap"
            where = f"{entry.name}.data_offsets"
            check.fail(where, f"begin {at}", f"begin {entry.begin}: {problem}")
        at = entry.end
    if at != data_bytes:
        check.fail("data", f"{at} bytes after the header", f"{data_bytes} bytes")
