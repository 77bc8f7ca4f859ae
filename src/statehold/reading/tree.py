"""The part of a step's tree that a dotted name means.

Invariants: a name means an entry of the tree, or all entries whose names begin with it: modules
have flat names, dicts and lists nested ones. The longest key that fits is entered first.
Not here: tensors and values (load), patterns (format/selection).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from statehold.encoding import values
from statehold.errors import StateMismatchError
from statehold.format.selection import nearest
from statehold.tensors import nodes


def part_of(tree: Any, name: str, where: str) -> Any:
    """The node that `name` means; the whole tree for "". Raises StateMismatchError; `where` is for
    the message."""
    found = _below(tree, name) if name else [tree]
    if not found:
        known = sorted({*_names(tree, "")})
        facts = {"step": where, "expected": "a name in the step", "got": name}
        if near := nearest(name, known):
            facts["near"] = ", ".join(near)
        hint = f"its names begin with {', '.join(sorted({each.split('.')[0] for each in known}))}"
        raise StateMismatchError("the step has nothing of this name", facts=facts, hint=hint)
    return found[0]


def _below(node: Any, name: str) -> list[Any]:
    """The node of `name`, or nothing."""
    members = _members(node)
    for key in sorted(members, key=len, reverse=True):
        if name == key:
            return [members[key]]
        if name.startswith(f"{key}.") and (found := _below(members[key], name[len(key) + 1 :])):
            return found
    inner = {
        key[len(name) + 1 :]: item for key, item in members.items() if key.startswith(f"{name}.")
    }
    return [values.mapping_of(inner)] if inner else []


def _members(node: Any) -> dict[str, Any]:
    """The members of a dict, a list or a tuple, by their keys as text."""
    items = nodes.payload(node, "$tuple") if type(node) is dict else node
    if type(items) is list:
        return {str(index): item for index, item in enumerate(items)}
    return {str(key): item for key, item in (nodes.members(node) or {}).items()}


def _names(node: Any, path: str) -> Iterator[str]:
    if path:
        yield path
    for key, item in _members(node).items():
        yield from _names(item, f"{path}.{key}" if path else key)
