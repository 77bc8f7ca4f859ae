"""Plain Python values as JSON, and back, with their types.

Owns: the value tags of the format (docs/format.md, "Values").
Invariants: decode(encode(x)) has the type and value of x at every depth. Values that JSON does not
have are tagged, values without a tag are refused with their path, and nothing is guessed. Only
exact types count, because a subclass may carry behaviour that would be lost. An object that the
state holds twice is encoded twice: sharing between containers is not kept. No pickle, no import of
torch or numpy.
Not here: tensors, arrays, scalars and dtypes. The caller's `leaf` hook encodes and decodes them
(tags $tensor, $ndarray, $complex128, $subclass, $npscalar, $torch). This module only checks their
form.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from operator import methodcaller
from typing import Any, NoReturn

from statehold.encoding.strictjson import CONTAINERS_MAX, Checker, show
from statehold.errors import ManifestError, UnsupportedValueError

# (value, path) -> JSON node, or None when the value is not the hook's business.
Leaf = Callable[[Any, str], Any | None]
# (members of a dict, its path) -> the nodes of its values, or None to have them encoded one by one.
Members = Callable[[Mapping[Any, Any], str], list[Any] | None]
# (tag, payload) -> value.
LeafReader = Callable[[str, Any], Any]

# The limits of the format, for both directions.
# Each level takes up to six calls of the thousand that Python allows, minus the caller's. A level
# is any node that is an object or an array, such as a tensor, but for the inside of its tag.
DEPTH_MAX = 100
# Doubles, and the JSON readers built on them, are exact below 2**53.
_INT_PLAIN_MAX = 2**53 - 1
# CPython parses at most 4300 digits by default; decimal conversion is quadratic.
_INT_DIGITS_MAX = 4000
_INT_MAX = 10**_INT_DIGITS_MAX - 1
MAXLEN_MAX = _INT_PLAIN_MAX  # of a deque
_FLOAT_NAMES = ("nan", "inf", "-inf")
_ROOT = object()
_is_tag = methodcaller("startswith", "$")
_TENSOR_TAGS = ("$tensor", "$ndarray", "$complex128", "$subclass")
# What has an equal and a hash that come back: all other nodes of hooks may stand for objects.
_IN_KEYS = frozenset({"$int", "$float", "$bytes", "$complex", "$npscalar", "$torch"})
_SUBCLASS = ("class", "context", "shape", "stride", "part", "tensors")


def encode(
    value: Any, path: str, leaf: Leaf | None = None, members: Members | None = None, depth: int = 0
) -> Any:
    """The JSON node for `value`, a snapshot that shares no container with it.

    `leaf` gets every value whose type has no plain encoding. `members` gets every dict and
    OrderedDict, and may make the nodes of its values at once. depth: the levels of nodes around it.
    Raises UnsupportedValueError (facts path, type) for what decode() would refuse: a value without
    a tag, more than DEPTH_MAX nested nodes, and so on; for a container that holds itself; and for
    a NaN as a key.
    """
    return Encoder(leaf, members, depth).encode(value, path)


def mapping_of(nodes: dict[Any, Any], leaf: Leaf | None = None) -> Any:
    """The node of a dict whose values are nodes already; `leaf` encodes keys as in encode()."""
    if set(map(type, nodes)) <= {str}:
        is_tagged = any(map(str.startswith, nodes, repeat("$")))
        if not is_tagged and well_formed("".join(nodes)):
            return nodes
    return {"$dict": [[Encoder(leaf).key(key, ""), node] for key, node in nodes.items()]}


def decode(node: Any, leaf: LeafReader | None) -> Any:
    """The value of a JSON node in one of the forms of docs/format.md.

    `leaf` gets (tag, payload) for $tensor, $ndarray, $npscalar and $torch, after the payload's form
    has been checked. For $complex128 the payload is the decoded tensor inside. For $subclass it is
    the members, with decoded `context` and `tensors`. Raises ManifestError (facts where, expected,
    got) for a node in none of these forms.
    """
    decoder = _Decoder(leaf)
    try:
        return decoder.node(node, 0)
    except RecursionError:
        decoder.trail.clear()
        decoder.fail("values that the stack of this thread can hold", "deeper ones")


def is_plain(value: object) -> bool:
    """Whether a value has a type that is stored by value, whatever it contains."""
    return value is None or type(value) in _SCALARS or type(value) in _CONTAINERS


def is_plain_key(key: object) -> bool:
    """Whether a dict with this key can be a JSON object."""
    return type(key) is str and _is_plain_name(key)


@functools.lru_cache(1 << 16)  # a state has the same names at every save
def _is_plain_name(key: str) -> bool:
    return not key.startswith("$") and well_formed(key)


def _plain_numbers(items: Iterable[Any]) -> bool:
    """Whether all items are numbers that JSON holds as they are; fast, for long lists of them."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return bool(min(items) >= -_INT_PLAIN_MAX and max(items) <= _INT_PLAIN_MAX)
    return kinds == {float} and all(map(math.isfinite, items))


def well_formed(text: str) -> bool:
    """Whether `text` is Unicode that UTF-8 can hold: no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


_HINTS: dict[str, str] = {
    "defaultdict": "store dict(value)",
    "bytearray": "store bytes(value)",
    "memoryview": "store bytes(value)",
    "BytesIO": "store value.getvalue()",
    "mappingproxy": "store dict(value)",
    "Namespace": "store vars(value)",
    "datetime": "store value.isoformat()",
    "date": "store value.isoformat()",
    "time": "store value.isoformat()",
    "timedelta": "store value.total_seconds()",
    "Decimal": "store str(value)",
    "Fraction": "store str(value)",
    "UUID": "store str(value)",
    "range": "store list(value), or its start, stop and step",
    "slice": "store its start, stop and step",
    "SimpleNamespace": "store vars(value)",
    "function": "keep code out of the state",
    "type": "keep code out of the state",
    "generator": "store list(value), or of pairs dict(value): dict(model.named_parameters())",
    "dict_values": "store list(value)",
    **dict.fromkeys(("Generator", "Random", "RandomState"), 'statehold.Rng({"mine": value})'),
    "module": "statehold.Rng() holds the generators of the modules random, numpy and torch",
}
_HINT = (
    "store plain values (None, bool, int, float, complex, str, bytes and containers of them), "
    "tensors, or an object with state_dict() and load_state_dict()"
)


def _hint_for(kind: type) -> str:
    if kind.__name__ in _HINTS:
        return _HINTS[kind.__name__]
    if hasattr(kind, "_fields"):
        return "store tuple(value) or value._asdict(): the class would be lost"
    for base in (bool, int, float, str, bytes, tuple, list, dict, set, frozenset):
        if issubclass(kind, base):
            return f"store {base.__name__}(value): the subclass would be lost"
    bases = {base.__name__ for base in kind.__mro__}
    if "Enum" in bases:
        return "store value.name, and look it up when you load: the class would be lost"
    if "PurePath" in bases:
        return "store str(value)"
    if hasattr(kind, "__dataclass_fields__"):
        return "store dataclasses.asdict(value): the class would be lost"
    return _HINT


class Encoder:
    """One encoding, of a value or of all parts of a state: the hooks, the containers being visited,
    how many were, and how many levels of nodes are around the next one."""

    __slots__ = ("active", "containers", "depth", "hashed", "keys", "leaf", "members")

    def __init__(
        self, leaf: Leaf | None = None, members: Members | None = None, depth: int = 0
    ) -> None:
        self.leaf = leaf
        self.members = members
        self.depth = depth
        self.active: set[int] = set()
        self.containers = 0
        self.hashed = 0  # > 0 inside dict keys and set elements
        self.keys = 0  # > 0 inside dict keys

    def encode(self, value: Any, path: str) -> Any:
        """The node of `value`, as for encode(); a hook calls this for what is inside of one."""
        try:
            return self.node(value, path)
        except RecursionError:
            summary = "the state nests deeper than the stack of this thread can hold"
            raise _unsupported(summary, path, value, "flatten it") from None

    def one_by_one(self, value: Any, path: str) -> Any:
        """encode() without the hook for members."""
        members, self.members = self.members, None
        try:
            return self.encode(value, path)
        finally:
            self.members = members

    def node(self, value: Any, path: str, key: object = _ROOT) -> Any:
        """The node of `value` at `path`, or at `path`.`key`; the two are joined only when
        needed."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str and well_formed(value):
            return value
        if kind is int and -_INT_PLAIN_MAX <= value <= _INT_PLAIN_MAX:
            return value
        if kind is float and math.isfinite(value):
            return value
        where = path if key is _ROOT else join(path, key)
        write = _CONTAINERS.get(kind)
        if write is None:
            return self._tagged(value, where)
        with self.within(value, where):
            return write(self, value, where)

    @contextlib.contextmanager
    def within(self, value: Any, path: str, levels: int = 1) -> Iterator[None]:
        """The nodes of what `value` holds are made here, so many levels of nodes below it."""
        self.containers += 1
        if id(value) in self.active:
            summary = "a container in the state holds itself"
            raise _unsupported(summary, path, value, "store each object once")
        self.check_depth(value, path, levels)
        if self.containers > CONTAINERS_MAX:
            summary = f"the state holds more than {CONTAINERS_MAX} containers"
            raise _unsupported(summary, path, value, "keep large collections in tensors")
        self.active.add(id(value))
        self.depth += levels
        try:
            yield
        finally:
            self.depth -= levels
            self.active.discard(id(value))

    def check_depth(self, value: Any, path: str, levels: int = 1) -> None:
        """Raise if so many more levels of nodes, which `value` takes, are too many."""
        if self.depth + levels > DEPTH_MAX:
            summary = f"the state nests containers more than {DEPTH_MAX} deep"
            raise _unsupported(summary, path, value, "flatten it")

    def _tagged(self, value: Any, path: str) -> Any:
        """The node of what is neither a container nor a value of JSON."""
        self.check_depth(value, path)
        node = _scalar(value)
        if node is None and self.leaf is not None:
            node = self.leaf(value, path)
        if node is None:
            raise self._no_tag(value, path)
        if self.hashed and not _IN_KEYS.issuperset(node if type(node) is dict else [None]):
            summary = "a tensor, or an object, is a dict key or an element of a set"
            raise _unsupported(summary, path, value, "these compare by identity; use a list")
        if self.keys and value != value:
            summary = "a NaN is a dict key, and nothing equals it, so no restore could find it"
            raise _unsupported(summary, path, value, "use another key, such as None")
        return node

    def _no_tag(self, value: Any, path: str) -> UnsupportedValueError:
        kind = type(value)
        if kind is int:
            summary = f"an int in the state has more than {_INT_DIGITS_MAX} digits"
            return _unsupported(summary, path, value, "store it as bytes")
        if kind is str:
            summary = "a str in the state has a lone surrogate, which UTF-8 cannot hold"
            return _unsupported(summary, path, value, "store it as bytes: os.fsencode(value)")
        return _unsupported("a value in the state cannot be stored", path, value, _hint_for(kind))

    def items(self, items: Any, path: str) -> list[Any]:
        if _plain_numbers(items):
            return list(items)
        return [self.node(item, path, index) for index, item in enumerate(items)]

    def unordered(self, items: Any, path: str) -> list[Any]:
        """Elements of a set, in an order that does not depend on their hashes."""
        self.hashed += 1
        nodes = [self.node(item, path, "{}") for item in items]
        self.hashed -= 1
        return sorted(nodes, key=lambda node: json.dumps(node, sort_keys=True))

    def pairs(self, members: Mapping[Any, Any], path: str) -> list[list[Any]]:
        known = self._known(members, path)
        if known and _plain_numbers(members):  # as the keys of a state_dict() of an optimizer
            return list(map(list, zip(members, known, strict=True)))
        nodes = []
        for index, (key, value) in enumerate(members.items()):
            name = self.key(key, path)
            nodes.append([name, known[index] if known else self.node(value, path, key)])
        return nodes

    def key(self, key: Any, path: str) -> Any:
        """The node of a key of the dict at `path`."""
        self.hashed += 1
        self.keys += 1
        node = self.node(key, path, "{}")
        self.hashed -= 1
        self.keys -= 1
        return node

    def mapping(self, members: dict[Any, Any], path: str) -> Any:
        for key in members:
            if not is_plain_key(key):
                return {"$dict": self.pairs(members, path)}
        if known := self._known(members, path):
            return dict(zip(members, known, strict=True))
        return {key: self.node(value, path, key) for key, value in members.items()}

    def _known(self, members: Mapping[Any, Any], path: str) -> list[Any] | None:
        """The nodes of the values, if the hook makes them: of containers one level deep."""
        if self.members is None or self.hashed or self.depth + 2 > DEPTH_MAX:
            return None
        return self.members(members, path)

    def ring(self, items: deque[Any], path: str) -> Any:
        if items.maxlen is not None and items.maxlen > MAXLEN_MAX:
            summary = "the maxlen of a deque in the state is too large"
            raise _unsupported(summary, path, items, f"the most is {MAXLEN_MAX}; None is no limit")
        return {"$deque": {"items": self.items(items, path), "maxlen": items.maxlen}}


def _scalar(value: Any) -> dict[str, Any] | None:
    """The node of a scalar that JSON does not have; None for any other value."""
    kind = type(value)
    if kind is int and -_INT_MAX <= value <= _INT_MAX:
        return {"$int": str(value)}
    if kind is float:
        return {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    return None


_SCALARS = (bool, int, float, complex, str, bytes)
_CONTAINERS: dict[type, Callable[[Encoder, Any, str], Any]] = {
    dict: Encoder.mapping,
    list: Encoder.items,
    tuple: lambda to, value, path: {"$tuple": to.items(value, path)},
    set: lambda to, value, path: {"$set": to.unordered(value, path)},
    frozenset: lambda to, value, path: {"$frozenset": to.unordered(value, path)},
    OrderedDict: lambda to, value, path: {"$ordered": to.pairs(value, path)},
    Counter: lambda to, value, path: {"$counter": to.pairs(value, path)},
    deque: Encoder.ring,
}


def join(path: str, key: object) -> str:
    """The path of the value with this key in the container at `path`."""
    name = key if type(key) is str else repr(key)
    return f"{path}.{name}" if path else name


def _unsupported(summary: str, path: str, value: Any, hint: str | None) -> UnsupportedValueError:
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return UnsupportedValueError(summary, facts={"path": path, "type": name}, hint=hint)


def _is_tensor(node: Any) -> bool:
    return type(node) is dict and len(node) == 1 and next(iter(node)) in _TENSOR_TAGS


class _Decoder:
    """One decoding: the hook, and the path to the current node, for messages."""

    __slots__ = ("check", "hashed", "leaf", "trail")

    def __init__(self, leaf: LeafReader | None) -> None:
        self.leaf = leaf
        self.trail: list[str | int] = []
        self.hashed = 0  # > 0 inside dict keys and set elements
        self.check = Checker(ManifestError, "the manifest holds a value that is not valid", "")

    def fail(self, expected: str, got: str) -> NoReturn:
        self.check.fail(".".join(map(str, ["state", *self.trail])), expected, got)

    def node(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if node is None or kind is bool:
            return node
        if kind is str:
            return self._text(node)
        if kind is int:
            if not -_INT_PLAIN_MAX <= node <= _INT_PLAIN_MAX:
                self.fail('a number below 2**53, or {"$int": ...}', show(node))
            return node
        if kind is float:
            if not math.isfinite(node):
                self.fail('a finite number, or {"$float": ...}', show(node))
            return node
        if kind is not list and kind is not dict:
            self.fail("a JSON value", show(node))
        if depth >= DEPTH_MAX:
            self.fail(f"containers nested at most {DEPTH_MAX} deep", "a deeper one")
        return self.items(node, depth + 1) if kind is list else self._object(node, depth + 1)

    def at(self, step: str | int, node: Any, depth: int) -> Any:
        self.trail.append(step)
        value = self.node(node, depth)
        self.trail.pop()
        return value

    def _text(self, text: str) -> str:
        if not well_formed(text):
            self.fail("Unicode text", "a lone surrogate")
        return text

    def _object(self, node: dict[str, Any], depth: int) -> Any:
        tag = next(filter(_is_tag, node), None)
        if tag is None:
            return {self._text(key): self.at(key, item, depth) for key, item in node.items()}
        read = _TAGS.get(tag)
        if read is None or len(node) != 1:
            self.fail("an object with one known tag", show(list(node)))
        self.trail.append(tag)
        value = read(self, node[tag], depth)
        self.trail.pop()
        return value

    def items(self, nodes: Any, depth: int) -> list[Any]:
        if type(nodes) is not list:
            self.fail("an array", show(nodes))
        if _plain_numbers(nodes):
            return list(nodes)
        return [self.at(index, node, depth) for index, node in enumerate(nodes)]

    def unordered(self, nodes: Any, depth: int) -> set[Any]:
        self.hashed += 1
        items = self.items(nodes, depth)
        self.hashed -= 1
        try:
            elements = set(items)
        except TypeError:
            self.fail("elements that can be hashed", show(nodes))
        if len(elements) != len(items):
            self.fail("every element once", "equal elements")
        return elements

    def pairs(self, nodes: Any, depth: int) -> dict[Any, Any]:
        if type(nodes) is not list:
            self.fail("an array of [key, value]", show(nodes))
        members: dict[Any, Any] = {}
        for index, pair in enumerate(nodes):
            if type(pair) is not list or len(pair) != 2:
                self.fail("an array of [key, value]", show(pair))
            self.hashed += 1
            key = self.at(index, pair[0], depth)
            self.hashed -= 1
            try:
                new = key not in members
            except TypeError:
                self.fail("a key that can be hashed", show(pair[0]))
            if not new:
                self.fail("every key once", f"{show(pair[0])} twice")
            members[key] = self.at(index, pair[1], depth)
        return members

    def big_int(self, text: Any, depth: int) -> int:
        value = 0
        if type(text) is str and len(text) <= _INT_DIGITS_MAX + 1:
            with contextlib.suppress(ValueError):
                value = int(text)
        # One spelling for each value: no spaces, underscores, plus signs or leading zeros.
        if abs(value) <= _INT_PLAIN_MAX or str(value) != text:
            self.fail("the decimal digits of an integer of 2**53 or more", show(text))
        return value

    def special_float(self, text: Any, depth: int) -> float:
        if text not in _FLOAT_NAMES:
            self.fail("nan, inf or -inf", show(text))
        return float(text)

    def binary(self, text: Any, depth: int) -> bytes:
        data = None
        if type(text) is str:
            with contextlib.suppress(ValueError):  # binascii.Error is one
                data = base64.b64decode(text, validate=True)
        if data is None:
            self.fail("base64", show(text))
        return data

    def complex(self, parts: Any, depth: int) -> complex:
        if type(parts) is not list or len(parts) != 2:
            self.fail("[real, imaginary]", show(parts))
        numbers = []
        for part in parts:
            try:
                number = float(part) if type(part) is str else None
            except ValueError:
                number = None
            if number is None or repr(number) != part:
                self.fail("the shortest decimal of a float, as a string", show(part))
            numbers.append(number)
        return complex(*numbers)

    def ring(self, node: Any, depth: int) -> deque[Any]:
        where = ".".join(map(str, ["state", *self.trail]))
        members = self.check.members(node, where, ("items", "maxlen"))
        limit = members["maxlen"]
        if limit is not None:
            self.check.integer(limit, f"{where}.maxlen", high=MAXLEN_MAX)
        items = self.items(members["items"], depth)
        if limit is not None and len(items) > limit:
            self.fail(f"at most maxlen = {limit} items", f"{len(items)}")
        return deque(items, limit)

    def name_of_tensor(self, name: Any, depth: int) -> Any:
        if type(name) is not str:
            self.fail("the name of a tensor", show(name))
        if self.hashed:
            self.fail("a value that is the same when it is equal", "a tensor as key or element")
        return self._leaf(name)

    def numpy_scalar(self, node: Any, depth: int) -> Any:
        where = ".".join(map(str, ["state", *self.trail]))
        members = self.check.members(node, where, ("dtype", "bytes"))
        if type(members["dtype"]) is not str:
            self.fail("the name of a NumPy dtype", show(members["dtype"]))
        self.binary(members["bytes"], depth)
        return self._leaf(members)

    def torch_value(self, node: Any, depth: int) -> Any:
        form = next(iter(node)) if type(node) is dict and len(node) == 1 else None
        payload = node[form] if form is not None else None
        if form == "size":
            valid = type(payload) is list and all(type(n) is int for n in payload)
        else:
            valid = form in ("dtype", "device") and type(payload) is str
        if not valid:
            self.fail('{"dtype": str}, {"device": str} or {"size": [int, ...]}', show(node))
        return self._leaf(node)

    def complex_tensor(self, node: Any, depth: int) -> Any:
        if type(node) is not dict or len(node) != 1 or not node.keys() <= {"$tensor", "$ndarray"}:
            self.fail("a tensor or an array", show(node))
        return self._leaf(self._object(node, depth))

    def subclass(self, node: Any, depth: int) -> Any:
        where = ".".join(map(str, ["state", *self.trail]))
        members = self.check.members(node, where, _SUBCLASS)
        if type(members["class"]) is not str:
            self.fail("the name of a class", show(members["class"]))
        sizes = [members["shape"], members["stride"]]
        if members["part"] is not None:
            part = self.check.members(members["part"], f"{where}.part", ("offsets", "of"))
            sizes += [part["offsets"], part["of"]]
        for size in sizes:
            if type(size) is not list or not all(type(n) is int and n >= 0 for n in size):
                self.fail("arrays of sizes", show(size))
        if len({len(size) for size in sizes}) > 1:
            self.fail("as many strides and offsets as sizes", show(sizes))
        inner = members["tensors"]
        if type(inner) is not dict or not inner or not all(map(_is_tensor, inner.values())):
            self.fail("tensors by name", show(inner))
        context = self.at("context", members["context"], depth)
        tensors = {self._text(name): self.at(name, each, depth) for name, each in inner.items()}
        return self._leaf({**members, "context": context, "tensors": tensors})

    def _leaf(self, payload: Any) -> Any:
        tag = str(self.trail[-1])
        if self.leaf is None:
            self.fail("a plain value", f"{tag} is not allowed here")
        return self.leaf(tag, payload)


_TAGS: dict[str, Callable[[_Decoder, Any, int], Any]] = {
    "$int": _Decoder.big_int,
    "$float": _Decoder.special_float,
    "$bytes": _Decoder.binary,
    "$complex": _Decoder.complex,
    "$tuple": lambda of, node, depth: tuple(of.items(node, depth)),
    "$set": _Decoder.unordered,
    "$frozenset": lambda of, node, depth: frozenset(of.unordered(node, depth)),
    "$dict": _Decoder.pairs,
    "$ordered": lambda of, node, depth: OrderedDict(of.pairs(node, depth)),
    "$counter": lambda of, node, depth: Counter(of.pairs(node, depth)),
    "$deque": _Decoder.ring,
    "$tensor": _Decoder.name_of_tensor,
    "$ndarray": _Decoder.name_of_tensor,
    "$npscalar": _Decoder.numpy_scalar,
    "$torch": _Decoder.torch_value,
    "$complex128": _Decoder.complex_tensor,
    "$subclass": _Decoder.subclass,
}
