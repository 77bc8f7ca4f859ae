"""Messages and their lines: all of each message comes back, and nothing else is one."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statehold.resilience.protocol.messages import (
    Beat,
    Complaint,
    Fenced,
    GivesUp,
    Hello,
    Install,
    Leave,
    Message,
    Prepare,
    Promise,
    Refused,
    View,
    Waiting,
    decode,
    encode,
)

numbers = st.integers(0, 2**62)
words = st.text(max_size=20)
names = words.filter(str.isprintable)
found_steps = st.integers(-1, 2**40)
shares = st.lists(numbers, max_size=5).map(tuple)
views = st.builds(View, found_steps, st.booleans(), shares, st.booleans(), names)
drawn = st.dictionaries(names, numbers, max_size=3)
texts = st.dictionaries(words, words, max_size=3)
hellos = st.builds(
    Hello,
    replica=names,
    place=st.integers(0, 3),
    width=st.integers(4, 8),
    job=texts,
    view=views,
    min_replicas=st.integers(1, 9),
    lease_s=st.floats(0.001, 1000.0),
    epoch=numbers,
    promised=numbers,
    failed=numbers,
    members=st.lists(names, max_size=3, unique=True).map(tuple),
    desk=names,
)
messages = st.one_of(
    hellos,
    st.builds(Beat, found_steps, drawn),
    st.builds(Promise, numbers, views),
    st.builds(Complaint, numbers, words),
    st.builds(Leave, views),
    st.builds(GivesUp, st.integers(0, 9)),
    st.builds(Prepare, numbers),
    st.builds(Waiting, numbers),
    st.builds(
        Install,
        numbers,
        st.dictionaries(names, views, max_size=4),
        st.lists(views, max_size=2).map(tuple),
        names,
        drawn,
    ),
    st.builds(Fenced, names),
    st.builds(Refused, names, texts),
)
HELLO = Hello("a", 0, 1, {"seed": "1"}, View(0))


@settings(max_examples=50)
@given(messages)
def test_a_message_comes_back_from_its_line(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


@settings(max_examples=30)
@given(st.dictionaries(names, views, min_size=2))
def test_members_come_back_in_their_order(of_members: dict[str, View]) -> None:
    found = decode(encode(Install(1, of_members)))
    assert isinstance(found, Install)
    assert found.members == tuple(of_members)


@given(st.binary(max_size=300))
def test_bytes_are_no_message(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@given(messages, st.data())
def test_a_message_with_another_value_is_one_or_a_value_error(
    message: Message, data: st.DataObject
) -> None:
    fields = json.loads(encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(plain)
    line = json.dumps(fields).encode()
    with contextlib.suppress(ValueError):
        found = decode(line)
        assert decode(encode(found)) == found


@pytest.mark.parametrize(
    "change",
    [
        {"replica": []},
        {"replica": {}},
        {"place": 1},
        {"place": -1},
        {"width": 0},
        {"lease_s": 0},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"lease_s": "1"},
        {"min_replicas": 0},
        {"epoch": 1.5},
        {"epoch": True},
        {"job": {"seed": 1}},
        {"members": "ab"},
        {"members": ["a", "a"]},
        {"replica": "two\nlines"},
        {"replica": "\ud800"},
        {"desk": "\x1b[2J"},
        {"lease_s": 10**400},
        {"epoch": 2**63},
        {"promised": 10**300},
        {"view": {"step": float("inf")}},
        {"stranger": 1},
    ],
    ids=str,
)
def test_a_hello_with_a_bad_field_is_no_message(change: dict[str, object]) -> None:
    fields = json.loads(encode(HELLO)) | change
    with pytest.raises(ValueError):
        decode(json.dumps(fields).encode())


@pytest.mark.parametrize("missing", ["is", "replica", "place", "width", "job", "view"])
def test_a_hello_without_a_field_is_no_message(missing: str) -> None:
    fields = json.loads(encode(HELLO))
    del fields[missing]
    with pytest.raises(ValueError):
        decode(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "line",
    [b"[" * 200_000, b"9" * 5000, b'{"is": "Prepare", "epoch": 1e999}', b'{"is": ["Hello"]}'],
    ids=["deep", "long number", "infinite", "a list"],
)
def test_what_json_stumbles_over_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError) as raised:
        decode(line)
    assert len(str(raised.value)) < 1000
