"""Structure-aware mutations of JSON documents, valid or not.

Invariants: the same text and seed give the same result; the result is bytes, not always JSON.
Not here: seals and lengths around the text; the targets put those on, so that a mutation gets past
them to the checks behind.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Place = tuple[Any, Any]  # a container, and the key or index of a node in it

INTEGERS = (0, 1, -1, 2, 3, 7, 255, 4095, 4096, 8192, 65536, 2**20, 2**24, 2**31, 2**32 - 1)
INTEGERS += (2**40, 2**53 - 1, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40)
STRINGS = ("", "..", "../x", "/etc/passwd", "a/b", "\0", "\ud800", "$tensor", "nan", "__metadata__")
STRINGS += ("rank-00000-of-00001.safetensors", "rank-00001-of-00004-1.safetensors", "x" * 5000)
STRINGS += ("F4", "F6_E2M3", "C64", "BOOL", "0" * 16, "f" * 64, "1e400", "5eed-1", "\uff11\uff12")
OTHERS = (None, True, False, 0.0, -0.0, 1.0, 1.5, 1e308, [], {}, [[]], [0], [0, 0], [[0, 0]])
OTHERS += ({"$tensor": "a"}, {"$dict": [[1, 2], [True, 3]]}, {"$set": [1, 1.0]}, {"$x": 1})
OTHERS += ({"$deque": {"items": [1], "maxlen": 0}}, {"$int": "9" * 4001}, {"$bytes": "=A=="})
OTHERS += ({"first": 0, "strides": [1]}, {"boxes": []}, {"mesh": 0, "splits": []})
MANY = 3000


def mutate(text: bytes, seed: int, size_max: int = 1 << 17) -> bytes:
    """`text` with one to four changes."""
    draw = random.Random(seed)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        change = _bytes if draw.random() < 0.1 else _document
        text = change(text, draw)
    return text[:size_max]


def _document(text: bytes, draw: random.Random) -> bytes:
    try:
        holder = [json.loads(text.decode("utf-8", "surrogatepass"))]
    except (ValueError, RecursionError):
        return _bytes(text, draw)
    places = list(_places(holder))
    try:
        draw.choice(CHANGES)(holder, places, draw)
        encoded = json.dumps(holder[0], separators=(",", ":"), ensure_ascii=False)
    except RecursionError:  # nested again and again
        return _bytes(text, draw)
    # A marker in a key makes it one that is there twice.
    return encoded.replace(_TWICE, "").encode("utf-8", "surrogatepass")


def _places(holder: Any) -> Iterator[Place]:
    left: list[Any] = [holder]
    while left:
        node = left.pop()
        for key in list(node) if type(node) is dict else range(len(node)):
            yield node, key
            if type(node[key]) in (dict, list):
                left.append(node[key])


# -- changes of a document -------------------------------------------------------------------------

_TWICE = "\ue000"


def _replace(holder: Any, places: list[Place], draw: random.Random) -> None:
    node, key = draw.choice(places)
    node[key] = copy.deepcopy(draw.choice(draw.choice((INTEGERS, STRINGS, OTHERS))))


def _adjust(holder: Any, places: list[Place], draw: random.Random) -> None:
    """A number a little off, or far off; a string with another character."""
    leaves = [each for each in places if type(each[0][each[1]]) in (int, str)]
    if not leaves:
        return
    node, key = draw.choice(leaves)
    value = node[key]
    if type(value) is int:
        node[key] = draw.choice((value + 1, value - 1, value * 2, -value, value ^ 4096, value + 8))
        return
    at = draw.randrange(len(value) + 1)
    node[key] = value[:at] + draw.choice("0af9/.-$\0é\n ") + value[at + draw.randrange(2) :]


def _remove(holder: Any, places: list[Place], draw: random.Random) -> None:
    node, key = draw.choice(places)
    if node is not holder:
        del node[key]


def _double(holder: Any, places: list[Place], draw: random.Random) -> None:
    node, key = draw.choice(places)
    if type(node) is dict:
        node[f"{key}{_TWICE}"] = copy.deepcopy(draw.choice(places)[0])
    elif node is not holder:
        node.insert(key, copy.deepcopy(node[key]))


def _rename(holder: Any, places: list[Place], draw: random.Random) -> None:
    node, key = draw.choice(places)
    if type(node) is dict:
        node[draw.choice((*STRINGS, str(key) + "x"))] = node.pop(key)


def _splice(holder: Any, places: list[Place], draw: random.Random) -> None:
    """One part of the document in the place of another."""
    (node, key), (other, name) = draw.choice(places), draw.choice(places)
    node[key] = copy.deepcopy(other[name])


def _swap(holder: Any, places: list[Place], draw: random.Random) -> None:
    kinds = draw.choice((dict, list, int, str))
    alike = [each for each in places if type(each[0][each[1]]) is kinds]
    if alike:
        (node, key), (other, name) = draw.choice(alike), draw.choice(alike)
        node[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(node[key])


def _shuffle(holder: Any, places: list[Place], draw: random.Random) -> None:
    node, _ = draw.choice(places)
    if type(node) is list:
        draw.shuffle(node)
    else:
        items = list(node.items())
        draw.shuffle(items)
        node.clear()
        node.update(items)


def _nest(holder: Any, places: list[Place], draw: random.Random) -> None:
    node, key = draw.choice(places)
    wrap: Callable[[Any], Any] = draw.choice(
        (
            lambda x: [x],
            lambda x: {"a": x},
            lambda x: {"$tuple": [x]},
            lambda x: {"$dict": [[0, x]]},
        )
    )
    for _ in range(draw.choice((1, 2, 3, 90, 190))):
        node[key] = wrap(node[key])


def _repeat(holder: Any, places: list[Place], draw: random.Random) -> None:
    node, key = draw.choice(places)
    value = node[key]
    if type(value) is list:
        node[key] = (value or [draw.choice(INTEGERS)]) * draw.choice((2, 3, MANY // 100))
    elif type(value) is str:
        node[key] = value * draw.choice((2, 3, 10))


CHANGES = (_replace, _replace, _adjust, _adjust, _adjust, _remove, _double, _rename, _splice)
CHANGES += (_splice, _swap, _swap, _shuffle, _nest, _repeat)

# -- changes of text -------------------------------------------------------------------------------


def _bytes(text: bytes, draw: random.Random) -> bytes:
    raw = bytearray(text or b"{}")
    at = draw.randrange(len(raw))
    kind = draw.randrange(5)
    if kind == 0:
        raw[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del raw[at : at + draw.choice((1, 2, 50))]
    elif kind == 2:
        raw[at:at] = draw.choice((b"[", b'{"a":', b"]", b'"', b"\\", b"\xff", b"NaN", b"1" * 5000))
    elif kind == 3:
        raw[at:at] = draw.choice((b"[", b'{"a":')) * draw.choice((100, 700, MANY))
    else:
        end = at + draw.randrange(1, 60)
        raw[at:at] = raw[at:end]
    return bytes(raw)
