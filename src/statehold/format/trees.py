"""The states of several ranks as one tree. Pure: works on encoded nodes (values).

Owns: `merge`, and looking into encoded nodes without decoding them.
Invariants: dicts are united by key, in the order of first appearance. Equal values stay. If values
differ, a rank that is at its place again keeps its own. Any other rank gets Differs, and never a
guess.
Not here: which ranks agree (manifest), the live objects (tensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statehold.encoding.strictjson import show
from statehold.layout.layout import Ranks

# Nodes of dicts that keep their keys in pairs.
_PAIRS = ("$dict", "$ordered")
_GROUPS, _GROUP, _PARAMS = "param_groups", "a group", "params"
_Members = Mapping[str, tuple[Any, Any]]

# The ranks that have the node, and the node.
Tree = tuple[Ranks, Any]


@dataclass(frozen=True, slots=True)
class Differs:
    """A place in a merged tree where ranks disagree: the nodes, and the ranks that have each."""

    values: tuple[Any, ...]
    ranks: tuple[Ranks, ...]

    def __str__(self) -> str:
        found = [f"{show(v)} on {r}" for v, r in zip(self.values, self.ranks, strict=True)]
        return "; ".join(found[:4]) + ("; ..." if len(found) > 4 else "")


def merge(trees: Sequence[Tree], rank: int, same_world: bool) -> Any:
    """One tree from the trees of groups of ranks. With `same_world`, `rank` was one of those ranks.

    Lists of the same length are merged item by item if they hold only containers. The parameter
    names of optimizer groups are united. Raises ValueError for no trees.
    """
    if not trees:
        raise ValueError("there is nothing to merge")
    return _Merger(rank if same_world else None).node(list(trees))


def members_of(node: Any) -> dict[str, tuple[Any, Any]] | None:
    """{name: (key node, node)} of a dict; None for other nodes.

    The name is the key if the key is a plain str. Otherwise it is `$` and the JSON of the key's
    node; no plain key begins with `$`.
    """
    if type(node) is not dict:
        return None
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return {key: (key, item) for key, item in node.items()}
    pairs = node[tag]
    if tag not in _PAIRS or type(pairs) is not list:
        return None
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        return None
    return {_name_of(key): (key, item) for key, item in pairs}


def tensors_of(node: Any) -> Iterator[str]:
    """The names of the tensors that a node refers to, in order, with repetitions."""
    left = [node]
    while left:
        node = left.pop()
        if type(node) is list:
            left += reversed(node)
        elif type(node) is dict:
            name = node.get("$tensor", node.get("$ndarray"))
            if name is None:
                left += reversed(node.values())
            else:
                yield name


def _name_of(key: Any) -> str:
    return key if type(key) is str and not key.startswith("$") else f"${_text(key)}"


def _text(node: Any) -> str:
    """A key that is equal for equal values of the same type: 1, 1.0 and true differ."""
    return json.dumps(node, sort_keys=True)


class _Merger:
    def __init__(self, own: int | None) -> None:
        self._own = own

    def node(self, trees: list[Tree], place: str = "") -> Any:
        """`place` is not empty on the way to the parameter names of an optimizer's groups."""
        if len(trees) == 1:
            return trees[0][1]
        dicts = [members_of(node) for _, node in trees]
        if all(members is not None for members in dicts):
            return self._dicts(trees, [members for members in dicts if members is not None], place)
        if place == _PARAMS and all(_is_names(node) for _, node in trees):
            return list(dict.fromkeys(name for _, names in trees for name in names))
        tag = _sequence_tag([node for _, node in trees])
        if tag is None:
            return self._leaf(trees)
        lists = [(ranks, _items_of(node, tag)) for ranks, node in trees]
        inner = _GROUP if place == _GROUPS else ""
        items = [
            self.node([(ranks, items[i]) for ranks, items in lists], inner)
            for i in range(len(lists[0][1]))
        ]
        return {tag: items} if tag else items

    def _dicts(self, trees: list[Tree], dicts: Sequence[_Members], place: str) -> Any:
        inner: dict[str, list[Tree]] = {}
        keys: dict[str, Any] = {}
        for (ranks, _), members in zip(trees, dicts, strict=True):
            for name, (key, item) in members.items():
                keys.setdefault(name, key)
                inner.setdefault(name, []).append((ranks, item))
        names = {_PARAMS} if place == _GROUP else {_GROUPS}
        merged = {
            name: self.node(parts, name if name in names else "") for name, parts in inner.items()
        }
        tags = {next((tag for tag in _PAIRS if tag in node), "") for _, node in trees}
        if tags == {""}:
            return merged
        tag = "$ordered" if tags == {"$ordered"} else "$dict"
        return {tag: [[keys[name], item] for name, item in merged.items()]}

    def _leaf(self, trees: list[Tree]) -> Any:
        different: dict[str, list[Tree]] = {}
        for tree in trees:
            different.setdefault(_text(tree[1]), []).append(tree)
        if len(different) == 1:
            return trees[0][1]
        for ranks, node in trees:
            if self._own is not None and self._own in ranks:
                return node
        return Differs(
            tuple(same[0][1] for same in different.values()),
            tuple(Ranks.union(ranks for ranks, _ in same) for same in different.values()),
        )


def _is_names(node: Any) -> bool:
    return type(node) is list and all(type(name) is str for name in node)


def _sequence_tag(nodes: Sequence[Any]) -> str | None:
    """The container to merge item by item: "" for lists, "$tuple" for tuples, None for others."""
    tag = "$tuple" if type(nodes[0]) is dict else ""
    lists = [_items_of(node, tag) for node in nodes]
    if len({len(items) for items in lists}) > 1 or not all(map(_is_nested, lists)):
        return None
    return tag


def _items_of(node: Any, tag: str) -> Any:
    """The items of a list or tuple; None, in a list, for anything else."""
    if type(node) is dict and tag:
        node = node.get(tag)
    elif tag:
        node = None
    return node if type(node) is list else [None]


def _is_nested(items: Sequence[Any]) -> bool:
    return all(type(item) in (dict, list) for item in items)
