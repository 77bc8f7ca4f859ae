"""Headers round trip, and arbitrary bytes never end in anything but HeaderError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.encoding import header
from statehold.encoding.header import DTYPE_BITS, Entry, bytes_of
from statehold.errors import HeaderError
from support.steps import header_of

text = st.text(st.characters(exclude_categories=["Cs"]))
names = text.filter(lambda name: name != header.METADATA)
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def files(draw: st.DrawFn) -> list[Entry]:
    entries, at = [], 0
    for name in draw(st.lists(names, unique=True, max_size=10)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = (*draw(shapes), 4) if DTYPE_BITS[dtype] < 8 else draw(shapes)
        end = at + (bytes_of(dtype, shape) or 0)
        entries.append(Entry(name, dtype, shape, at, end))
        at = end
    return entries


@pytest.mark.thorough
@given(files(), st.dictionaries(text, text, max_size=5))
def test_round_trip(entries: list[Entry], metadata: dict[str, str]) -> None:
    raw = header.encode(entries, metadata)
    file_bytes = len(raw) + (entries[-1].end if entries else 0)
    assert len(raw) % header.PAGE == 0
    assert header.decode(raw, file_bytes, "f") == (entries, metadata, len(raw))


def outcome(raw: bytes, file_bytes: int) -> HeaderError | None:
    try:
        header.decode(raw, file_bytes, "f")
    except HeaderError as fault:
        return fault
    return None


def check(raw: bytes, file_bytes: int) -> None:
    """A header is refused with all facts, or describes the whole file."""
    fault = outcome(raw, file_bytes)
    if fault is None:  # another name, dtype or shape of the same size: for the checksums to find
        found, _, data_begin = header.decode(raw, file_bytes, "f")
        assert data_begin + sum(e.end - e.begin for e in found) == file_bytes
    else:
        assert {"file", "where", "expected", "got"} <= set(fault.facts)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_arbitrary_bytes(raw: bytes, file_bytes: int) -> None:
    fault = outcome(raw, file_bytes)
    assert fault is not None
    assert {"file", "where", "expected", "got"} <= set(fault.facts)


@given(files(), st.data())
def test_one_wrong_byte_is_refused_or_means_the_same_bytes(
    entries: list[Entry], data: st.DataObject
) -> None:
    raw = bytearray(header.encode(entries, {"k": "v"}))
    file_bytes = len(raw) + (entries[-1].end if entries else 0)
    at = data.draw(st.integers(0, len(bytes(raw).rstrip(b" ")) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    check(bytes(raw), file_bytes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
)
members = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8"]) | json_values},
    optional={"shape": json_values, "data_offsets": json_values, "more": json_values},
)


@pytest.mark.thorough
@given(st.dictionaries(text | st.just(header.METADATA), members | json_values, max_size=3))
def test_arbitrary_members(document: dict[str, object]) -> None:
    raw = header_of(document)
    check(raw, len(raw))
