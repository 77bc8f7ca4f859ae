"""What the tests of lying documents share: wrong values, wrong members, and what a refusal says.

A document is changed in one place and sealed again by the test; that it is refused is checked
here, with the facts that every such error has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from statehold.errors import StateholdError
from support.faults import must
from support.steps import changed

Where = Sequence[str | int]
Cases = list[tuple[Where, list[Any]]]  # (where, values that must not stand there)
E = TypeVar("E", bound=StateholdError)

NOT_INTEGERS: list[Any] = [None, True, 1.0, "1", [1], {}, -1, 2**63, 10**30]
NOT_STRINGS: list[Any] = [None, True, 7, 1.5, ["x"], {"x": 1}]
NOT_ARRAYS: list[Any] = [None, True, 3, "abc", {}]
NOT_OBJECTS: list[Any] = [None, True, 3, "abc", []]
MESSAGE_MAX = 4000


def refused_as(kind: type[E], file: str, decode: Callable[[], object]) -> E:
    """The error of `decode`, which says what is wrong where, and not at length."""
    with pytest.raises(kind) as caught:
        decode()
    error = caught.value
    must({"file", "where", "expected", "got"} <= set(error.facts), error)
    must(error.facts["file"] == file, error)
    must(len(str(error)) < MESSAGE_MAX)
    return error


def each_wrong(cases: Iterable[tuple[Where, list[Any]]]) -> pytest.MarkDecorator:
    """A test for every value that must not stand somewhere: test(where, value)."""
    return pytest.mark.parametrize(
        ("where", "value"),
        [
            pytest.param(where, value, id=f"{'.'.join(map(str, where))}={str(value)[:24]!a}")
            for where, wrong in cases
            for value in wrong
        ],
    )


def missing_and_unknown(document: dict[str, Any], where: Where) -> Iterator[dict[str, Any]]:
    """`document` without each member of the object at `where`, and with one that nobody knows."""
    node: Any = document
    for key in where:
        node = node[key]
    others = [{key: value for key, value in node.items() if key != name} for name in node]
    for other in [*others, {**node, "more": 1}]:
        yield changed(document, where, other) if where else other
