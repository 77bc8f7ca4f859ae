"""Plain values and their tags: what is written, what is refused, and with which words."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import io
import json
import math
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

from statehold.encoding import values
from statehold.errors import ManifestError, UnsupportedValueError

SUBCLASS = {
    "class": "m.C",
    "context": None,
    "shape": [2, 3],
    "stride": [3, 1],
    "part": None,
    "tensors": {"codes": {"$tensor": "t.codes"}},
}
CHANGES: list[dict[str, Any]] = [
    {"class": 1},
    {"context": {"$int": "1"}},
    {"shape": [2]},
    {"shape": [2, -3]},
    {"stride": [3, True]},
    {"part": {"offsets": [0]}},
    {"part": {"offsets": [0], "of": [4, 3]}},
    {"tensors": {}},
    {"tensors": {"codes": 1}},
    {"tensors": {"codes": {"$ordered": []}}},
    {"tensors": {"codes": {"$tensor": 2}}},
    {"more": 1},
]


class Colour(enum.IntEnum):
    RED = 1


class Sized(dict):  # type: ignore[type-arg]
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (None, None),
        (True, True),
        (2**53 - 1, 2**53 - 1),
        (2**53, {"$int": "9007199254740992"}),
        (-(2**53), {"$int": "-9007199254740992"}),
        (1.0, 1.0),
        (math.inf, {"$float": "inf"}),
        (-math.inf, {"$float": "-inf"}),
        (math.nan, {"$float": "nan"}),
        (complex(1, -0.0), {"$complex": ["1.0", "-0.0"]}),
        (b"\x00\xff", {"$bytes": "AP8="}),
        ((1, (2,)), {"$tuple": [1, {"$tuple": [2]}]}),
        ({"b", "a"}, {"$set": ["a", "b"]}),
        (frozenset({2, 1}), {"$frozenset": [1, 2]}),
        ({"a": [1]}, {"a": [1]}),
        ({1: "x"}, {"$dict": [[1, "x"]]}),
        ({"$tensor": 1}, {"$dict": [["$tensor", 1]]}),
        ({"$": 1, "a": 2}, {"$dict": [["$", 1], ["a", 2]]}),
        (OrderedDict(a=1), {"$ordered": [["a", 1]]}),
        (Counter("aab"), {"$counter": [["a", 2], ["b", 1]]}),
        (deque([1], 3), {"$deque": {"items": [1], "maxlen": 3}}),
        (deque(), {"$deque": {"items": [], "maxlen": None}}),
    ],
)
def test_nodes(value: Any, node: Any) -> None:
    encoded = values.encode(value, "x")
    assert encoded == node
    back = values.decode(json.loads(json.dumps(encoded)), None)
    assert type(back) is type(value)
    assert back == value or value != value


def test_numbers_keep_their_type_through_json() -> None:
    numbers = [1, 1.0, -0.0, 1e16, True, 5e-324, 1.7976931348623157e308]
    back = values.decode(json.loads(json.dumps(values.encode(numbers, "x"))), None)
    assert [(type(n), repr(n)) for n in back] == [(type(n), repr(n)) for n in numbers]


def test_a_snapshot_shares_nothing() -> None:
    inner = [1, 2]
    node = values.encode({"a": inner}, "x")
    inner.append(3)
    assert node == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Colour.RED, "int(value)"),
        (Sized(), "dict(value)"),
        (defaultdict(list), "dict(value)"),
        (Point(1, 2), "_asdict"),
        (bytearray(b"x"), "bytes(value)"),
        (io.BytesIO(b"x"), "value.getvalue()"),
        (PurePosixPath("/x"), "str(value)"),
        (object(), "state_dict()"),
        (len, "plain values"),
        (int, "keep code out"),
        (range(3), "list(value)"),
        ("\ud800", "fsencode"),
    ],
)
def test_refused_with_path_type_and_hint(value: Any, hint: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        values.encode({"data": [0, (value,)]}, "state")
    assert caught.value.facts["path"] == "state.data.1.0"
    assert type(value).__qualname__ in caught.value.facts["type"]
    assert hint in str(caught.value)


def test_an_int_without_end_is_refused() -> None:
    for value in (10**5000, -(10**5000)):
        with pytest.raises(UnsupportedValueError, match="4000 digits"):
            values.encode([value], "x")
    value = 10**3990
    assert values.decode(values.encode(value, "x"), None) == value


def test_paths_of_keys() -> None:
    for value, path in [
        ({None: object()}, "x.None"),
        ({0: object()}, "x.0"),
        (OrderedDict(a=object()), "x.a"),
        ({(1, 2): object()}, "x.(1, 2)"),
    ]:
        with pytest.raises(UnsupportedValueError) as caught:
            values.encode(value, "x")
        assert caught.value.facts["path"] == path
    with pytest.raises(UnsupportedValueError) as caught:
        values.encode({"a": object()}, "")
    assert caught.value.facts["path"] == "a"


def test_cycles_are_refused() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(UnsupportedValueError, match="holds itself") as caught:
        values.encode(cycle, "x")
    assert caught.value.facts["path"] == "x.1.again"


def test_a_container_may_be_there_twice() -> None:
    shared = [1]
    assert values.encode([shared, shared], "x") == [[1], [1]]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_depth_is_limited_both_ways() -> None:
    allowed = nested(values.DEPTH_MAX)
    assert values.decode(values.encode(allowed, "x"), None) == allowed
    with pytest.raises(UnsupportedValueError, match=f"{values.DEPTH_MAX} deep"):
        values.encode([allowed], "x")
    with pytest.raises(ManifestError) as caught:
        values.decode([allowed], None)
    assert f"{values.DEPTH_MAX} deep" in caught.value.facts["expected"]


WRAPS: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "dict": lambda value: {"a": value},
    "pairs": lambda value: {1: value},
    "ordered": lambda value: OrderedDict(a=value),
    "frozenset": lambda value: frozenset([value]),
    "deque": lambda value: deque([value]),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_what_can_be_saved_can_be_restored(wrap: Callable[[Any], Any]) -> None:
    value: Any = 5
    for _ in range(values.DEPTH_MAX):
        value = wrap(value)
    assert values.decode(values.encode(value, "x"), None) == value


def test_a_stack_with_too_little_left() -> None:
    node: Any = 5
    for _ in range(values.DEPTH_MAX):
        node = [node]

    def deep(levels: int) -> Any:
        return deep(levels - 1) if levels else values.decode(node, None)

    depth = len(inspect.stack())
    with pytest.raises(ManifestError, match="stack"):
        deep(sys.getrecursionlimit() - depth - values.DEPTH_MAX)


def test_expansion_of_shared_containers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "CONTAINERS_MAX", 1000)
    value: list[Any] = []
    for _ in range(20):
        value = [value, value]
    with pytest.raises(UnsupportedValueError, match="more than 1000 containers"):
        values.encode(value, "x")


class Box:
    """Stands for a tensor: only the hook knows it."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_the_hook_sees_what_is_not_plain() -> None:
    seen = []

    def leaf(value: Any, path: str) -> Any:
        seen.append(path)
        return {"$tensor": path} if isinstance(value, Box) else None

    node = values.encode({"a": [Box("1"), 2], "b": "x"}, "s", leaf)
    assert node == {"a": [{"$tensor": "s.a.0"}, 2], "b": "x"}
    assert seen == ["s.a.0"]
    with pytest.raises(UnsupportedValueError):
        values.encode(object(), "s", leaf)
    found = values.decode(node, lambda tag, payload: Box(f"{tag} {payload}"))
    assert found["a"][0].name == "$tensor s.a.0"


@pytest.mark.parametrize("value", [{Box("k"): 1}, {Box("e")}, {(1, Box("t"))}])
def test_tensors_are_no_keys_and_no_elements(value: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="dict key"):
        values.encode(value, "x", lambda value, path: {"$tensor": path})


def test_the_order_of_a_set_does_not_depend_on_hashes() -> None:
    words = {f"word {i}" for i in range(100)}
    assert values.encode(words, "x") == {"$set": sorted(words)}


@pytest.mark.parametrize(
    "node",
    [
        {"$unknown": 1},
        {"$int": "1"},
        {"$int": 2**60},
        {"$int": "1_000_000_000_000_000_000"},
        {"$int": "+9007199254740992"},
        {"$int": " 9007199254740992"},
        {"$int": "09007199254740992"},
        {"$int": "9" * 5000},
        2**53,
        math.inf,
        math.nan,
        {"$float": "1.0"},
        {"$float": "NaN"},
        {"$float": ["nan"]},
        {"$bytes": "a"},
        {"$bytes": "AP 8="},
        {"$bytes": None},
        {"$complex": ["1.0"]},
        {"$complex": ["1", "1.0"]},
        {"$complex": [1.0, 1.0]},
        {"$complex": ["x", "1.0"]},
        {"$tuple": {}},
        {"$tuple": "ab"},
        {"$set": [1, 1]},
        {"$set": [[1]]},
        {"$frozenset": [{}]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[1]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[], 1]]},
        {"$dict": {"a": 1}},
        {"$ordered": 1},
        {"$counter": ["ab"]},
        {"$deque": []},
        {"$deque": {"items": [1]}},
        {"$deque": {"items": [1, 2], "maxlen": 1}},
        {"$deque": {"items": [], "maxlen": -1}},
        {"$deque": {"items": [], "maxlen": True}},
        {"$deque": {"items": [], "maxlen": None, "more": 1}},
        {"$tuple": [], "$set": []},
        {"$tuple": [], "a": 1},
        {"a": 1, "$b": 2},
        {"$tensor": 5},
        {"$set": [{"$tensor": "x"}]},
        {"$dict": [[{"$tuple": [{"$ndarray": "x"}]}, 1]]},
        {"$ndarray": None},
        {"$npscalar": {"dtype": "float64"}},
        {"$npscalar": {"dtype": 1, "bytes": ""}},
        {"$npscalar": {"dtype": "float64", "bytes": "?"}},
        {"$complex128": "t"},
        {"$complex128": {"$subclass": {}}},
        {"$complex128": {"$tensor": "t", "more": 1}},
        {"$complex128": {"$tensor": 1}},
        *({"$subclass": SUBCLASS | change} for change in CHANGES),
        {"$subclass": {key: item for key, item in SUBCLASS.items() if key != "part"}},
        {"$set": [{"$complex128": {"$tensor": "t"}}]},
        {"$torch": {"dtype": 1}},
        {"$torch": {"size": [1.0]}},
        {"$torch": {"size": [True]}},
        {"$torch": {"code": "import os"}},
        {"$torch": {}},
        {"$torch": "float32"},
        "\udc80",
        {"\udc80": 1},
    ],
)
def test_nodes_in_no_form(node: Any) -> None:
    with pytest.raises(ManifestError) as caught:
        values.decode({"a": [node]}, lambda tag, payload: payload)
    assert caught.value.facts["where"].startswith("state.a.0")
    assert {"expected", "got"} <= set(caught.value.facts)


@pytest.mark.parametrize("tag", ["$tensor", "$ndarray"])
def test_tensors_need_a_hook(tag: str) -> None:
    with pytest.raises(ManifestError):
        values.decode({tag: "x"}, None)


def test_the_hook_gets_checked_payloads() -> None:
    nodes: list[dict[str, Any]] = [
        {"$tensor": "a"},
        {"$ndarray": "b"},
        {"$npscalar": {"dtype": "int8", "bytes": "AA=="}},
        {"$torch": {"dtype": "float32"}},
        {"$torch": {"device": "cuda:0"}},
        {"$torch": {"size": [1, 2]}},
    ]
    got = values.decode(nodes, lambda tag, payload: (tag, payload))
    assert got == [next(iter(node.items())) for node in nodes]


class _Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class _Config:
    lr: float = 0.1


HINTED: list[tuple[Any, str]] = [
    (_Color.RED, "value.name"),
    (_Config(), "dataclasses.asdict(value)"),
    (range(3), "list(value)"),
    (PurePosixPath("a"), "str(value)"),
    (datetime.datetime(2026, 1, 1), "isoformat()"),
    (datetime.date(2026, 1, 1), "isoformat()"),
    (datetime.timedelta(1), "total_seconds()"),
    (decimal.Decimal(1), "str(value)"),
    (types.SimpleNamespace(a=1), "vars(value)"),
    ((each for each in ()), "list(value)"),
    (random.Random(1), "statehold.Rng"),
    (np.random.RandomState(1), "statehold.Rng"),
    (random, "statehold.Rng()"),
    ({}.values(), "list(value)"),
]


@pytest.mark.parametrize(("value", "hint"), HINTED, ids=lambda each: type(each).__name__)
def test_what_to_store_instead(value: Any, hint: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        values.encode({"config": [value]}, "state")
    assert caught.value.facts["path"] == "state.config.0"
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("keys", [(0, 1), (2**53, 1), (True, 2), (0.5, 2.0), (1, "a"), (-1, 2.5)])
def test_known_values_have_the_keys_that_values_one_by_one_have(keys: tuple[object, ...]) -> None:
    members = dict.fromkeys(keys, "x")
    one_by_one = values.encode(members, "")
    given = values.encode(members, "", members=lambda held, _: [*held.values()])
    assert given == one_by_one
    assert repr(given) == repr(one_by_one)  # True and 1 are equal
