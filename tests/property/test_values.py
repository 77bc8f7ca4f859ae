"""decode(encode(x)) is x, types and all, for any value that encode takes."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.encoding import values
from statehold.encoding.strictjson import measured
from statehold.errors import ManifestError

text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.integers(2**53 - 2, 2**53 + 2),
    st.floats(),
    st.complex_numbers(),
    text,
    st.sampled_from(["$tensor", "$", "$$x", ""]),
    st.binary(),
)


def hashables_of(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)
        ),
        max_leaves=5,
    )


hashables = hashables_of(scalars)
keys = hashables_of(scalars.filter(lambda value: value == value))  # NaN is refused as a key


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.integers()),
        st.lists(st.floats()),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
        st.dictionaries(text, inner, max_size=4),
        members,
        members.map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(0, 6)),
    )


plain = st.recursive(scalars, containers, max_leaves=30)


def canonical(value: Any) -> Any:
    """`value` as something that `==` compares by type, sign and class of NaN as well."""
    kind = type(value).__name__
    if isinstance(value, float):
        return (kind, "nan" if math.isnan(value) else repr(value))
    if isinstance(value, complex):
        return (kind, canonical(value.real), canonical(value.imag))
    if isinstance(value, Counter | dict):
        return (kind, [(canonical(k), canonical(v)) for k, v in value.items()])
    if isinstance(value, set | frozenset):
        return (kind, sorted((canonical(item) for item in value), key=repr))
    if isinstance(value, deque):
        return (kind, value.maxlen, [canonical(item) for item in value])
    if isinstance(value, list | tuple):
        return (kind, [canonical(item) for item in value])
    return (kind, value)


@pytest.mark.thorough
@given(plain)
def test_round_trip(value: Any) -> None:
    node = values.encode(value, "x")
    raw = json.dumps(node, ensure_ascii=False, allow_nan=False).encode("utf-8")
    back = values.decode(json.loads(raw), None)
    assert canonical(back) == canonical(value)
    assert values.encode(back, "x") == node


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(sorted(values._TAGS)), inner, max_size=3)
    ),
)


@given(json_values)
def test_any_json_is_a_value_or_a_manifest_error(node: Any) -> None:
    fault = None
    try:
        values.decode(node, lambda tag, payload: tag)
    except ManifestError as caught:
        fault = caught
    if fault is not None:
        assert {"where", "expected", "got"} <= set(fault.facts)


def depth_by_recursion(node: Any) -> int:
    if isinstance(node, dict):
        return 1 + max(map(depth_by_recursion, node.values()), default=0)
    if isinstance(node, list):
        return 1 + max(map(depth_by_recursion, node), default=0)
    return 0


brackets = st.text(st.sampled_from('[]{}"\\ax\n'))


@pytest.mark.thorough
@given(
    st.recursive(
        st.integers() | brackets,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(brackets, inner, max_size=3),
    )
)
def test_depth_is_measured_without_parsing(node: Any) -> None:
    assert measured(json.dumps(node).encode())[0] == depth_by_recursion(node)
