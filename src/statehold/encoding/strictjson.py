"""Strict reading of JSON from files that may be damaged or hostile, and from peers on sockets.

Owns: parsing with a depth limit, without duplicate keys, NaN or Infinity; the checks that a parsed
value has the type and range of its format.
Invariants: any input ends in a value or in the named error of the caller, in time and memory linear
in the input. Arrays and objects are counted, and their nesting is measured, before the recursive
parser makes them: neither their memory nor the recursion limit of the process matters.
Not here: the meaning of the members (header, manifest, values).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

from statehold.errors import CorruptionError

# Messages of processes to each other nest less deeply.
MESSAGE_DEPTH_MAX = 8

# Containers are expanded at every reference, so a few lists can stand for 2**100 nodes.
CONTAINERS_MAX = 1 << 22

# File offsets and sizes are signed 64-bit in every interface below us.
INT_MAX = 2**63 - 1

_STRING = re.compile(rb'"[^"]*"?')
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxlong = 40
_repr.maxlevel = 2
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 4


def show(value: object) -> str:
    """`value` for an error message: bounded, however large or nested the value is."""
    return _repr.repr(value)


def measured(text: bytes) -> tuple[int, int]:
    """How deeply arrays and objects nest in JSON text, and how many there are. No recursion."""
    # An even run of backslashes escapes itself. A single one before a quote escapes the quote.
    text = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
    # Two quotes side by side never change which brackets are inside a string.
    brackets = _STRING.sub(b"", text.replace(b'""', b""))
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    return depth, brackets.count(b"[") + brackets.count(b"{")


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _DuplicateKey(show(twice))
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@dataclass(slots=True)
class Checker:
    """Checks one file's JSON; every failure is `error` with facts file, where, expected, got."""

    error: type[CorruptionError]
    summary: str
    file: str
    hint: str | None = None

    def fail(self, where: str, expected: str, got: str) -> NoReturn:
        # Names come from the file, too. A message must stay readable with any name.
        place = where if len(where) <= 300 else f"{where[:300]}..."
        if not place.isprintable():
            place = ascii(place)[1:-1]
        facts = {"file": self.file, "where": place, "expected": expected, "got": got}
        if not self.file:
            del facts["file"]
        raise self.error(self.summary, facts=facts, hint=self.hint)

    def parse(self, text: bytes, where: str, depth_max: int) -> Any:
        """The value of JSON `text`, which must be UTF-8 and nest at most `depth_max` deep."""
        depth, containers = measured(text)
        if depth > depth_max:
            self.fail(where, f"JSON nested at most {depth_max} deep", f"{depth} levels")
        # An empty one has 3 bytes of text, and 26 times that in memory. The tensors of a step have
        # more than 16 bytes for each, and only states of millions of small containers less.
        most = max(CONTAINERS_MAX, len(text) // 16)
        if containers > most:
            self.fail(where, f"at most {most} arrays and objects", str(containers))
        try:
            decoded = text.decode("utf-8")
            return json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
        except _DuplicateKey as fault:
            self.fail(where, "every key once in an object", f"{fault} twice")
        except UnicodeDecodeError as fault:
            self.fail(where, "UTF-8 text", f"a bad byte at {fault.start}")
        except ValueError as fault:  # JSONDecodeError, a non-finite constant, an endless integer
            self.fail(where, "JSON", str(fault)[:200])
        except RecursionError:
            self.fail(where, "JSON that the stack of this thread can parse", f"{depth} levels")

    def headed(
        self, text: bytes, depth_max: int, form: str, versions: Sequence[int]
    ) -> dict[str, Any]:
        """The object in the file, which says its format and one of these versions."""
        found = self.object(self.parse(text, "the file", depth_max), "the file")
        said, version = found.get("format"), found.get("version")
        if said != form or type(version) is not int or version not in versions:
            got = f"{said!r}, {version!r}"[:100]
            self.fail("format and version", f"{form!r}, {' or '.join(map(str, versions))}", got)
        return found

    def integer(self, value: Any, where: str, low: int = 0, high: int = INT_MAX) -> int:
        # `type` and not isinstance: True is an int to Python, but not in a file.
        if type(value) is not int or not low <= value <= high:
            self.fail(where, f"an integer from {low} to {high}", show(value))
        return value

    def text(self, value: Any, where: str, pattern: re.Pattern[str], expected: str) -> str:
        if type(value) is not str or pattern.fullmatch(value) is None:
            self.fail(where, expected, show(value))
        return value

    def array(self, value: Any, where: str) -> list[Any]:
        if type(value) is not list:
            self.fail(where, "an array", show(value))
        return value

    def object(self, value: Any, where: str) -> dict[str, Any]:
        if type(value) is not dict:
            self.fail(where, "an object", show(value))
        return value

    def members(self, value: Any, where: str, names: Iterable[str]) -> dict[str, Any]:
        """`value`, an object that has exactly the members `names`."""
        found = self.object(value, where)
        names = tuple(names)
        missing = [name for name in names if name not in found]
        if missing:
            self.fail(where, f"a member {missing[0]!r}", f"members {show(list(found))}")
        if len(found) > len(names):
            unknown = next(name for name in found if name not in names)
            self.fail(where, f"only the members {', '.join(names)}", f"a member {show(unknown)}")
        return found

    def shape(self, value: Any, where: str) -> tuple[int, ...]:
        sizes = self.array(value, where)
        for size in sizes:
            self.integer(size, where)
        return tuple(sizes)


_MESSAGES = Checker(CorruptionError, "not a message", "")


def message(text: bytes, depth_max: int = MESSAGE_DEPTH_MAX) -> Any:
    """The value of a message that came through a socket, from a peer that may be anybody.

    Raises ValueError for everything that is no JSON, and for nothing else.
    """
    try:
        return _MESSAGES.parse(text, "a message", depth_max)
    except CorruptionError as error:
        raise ValueError(str(error)) from None
