"""The plain values of a state, flat: the place of each, and its value. Works on encoded nodes.

Invariants: equal states have equal leaves, and different ones do not. A container that is not a
plain dict or list has an entry at its own place, and an empty one, too.
Not here: the meaning of the tags (encoding/values), how ranks are merged (trees).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from statehold.format.trees import Differs, members_of

_TENSORS = ("$tensor", "$ndarray", "$complex128")
_NOTHING = object()


def leaves_of(node: Any) -> dict[str, Any]:
    """{path: node} of nodes that are neither a container nor a tensor."""
    return dict(_leaves(node, ""))


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    left = [(path, node)]
    while left:
        path, node = left.pop()
        inner, entry = _opened(node)
        if entry is not _NOTHING:
            yield path, entry
        left += [(f"{path}.{key}" if path else key, item) for key, item in reversed(inner)]


def _opened(node: Any) -> tuple[list[tuple[str, Any]], Any]:
    """(members, the entry of the node itself)."""
    if isinstance(node, Differs):
        return [], {"ranks differ": str(node)}
    if isinstance(node, list):
        return _items(node), _NOTHING if node else []
    members = members_of(node)
    if members is not None:
        tag = next((key for key in node if key.startswith("$")), None)
        entry = {tag: len(members)} if tag else _NOTHING if members else {}
        return [(key, item) for key, (_, item) in members.items()], entry
    if isinstance(node, dict) and "$tuple" in node:
        return _items(node["$tuple"]), {"$tuple": len(node["$tuple"])}
    is_tensor = isinstance(node, dict) and any(tag in node for tag in _TENSORS)
    return [], _NOTHING if is_tensor else node


def _items(nodes: list[Any]) -> list[tuple[str, Any]]:
    return [(str(i), item) for i, item in enumerate(nodes)]
