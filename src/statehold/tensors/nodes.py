"""Looking into the saved tree: members of dicts, tags, places where ranks differ, renaming.

Invariants: nothing here changes a node that it was given.

Not here: what the nodes mean (values), what becomes of them (matching).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from statehold.format.selection import Selection
from statehold.format.trees import Differs
from statehold.tensors import foreign
from statehold.tensors.marks import Mark


def members(node: Any) -> dict[Any, Any] | None:
    """The members of a saved dict, whichever way it was encoded; None for anything else."""
    if type(node) is not dict:
        return None
    if not tag(node):
        return node
    pairs = node.get("$dict", node.get("$ordered"))
    return None if pairs is None else {foreign.key_of(key): item for key, item in pairs}


def tag(node: dict[str, Any]) -> str | None:
    return next((key for key in node if key.startswith("$")), None)


def payload(node: Any, name: str) -> Any | None:
    return node.get(name) if type(node) is dict else None


def differing(node: Any) -> Differs | None:
    """The first place in a node on which ranks differ."""
    left = [node]
    while left:
        node = left.pop()
        if isinstance(node, Differs):
            return node
        if type(node) is dict:
            left += reversed(node.values())
        elif type(node) is list:
            left += reversed(node)
    return None


def renamed(saved: Mapping[Any, Any], live: Any, selection: Selection) -> dict[Any, Any]:
    """The members of the top of a tree under the names that the live state has for them.

    Names of parameters inside optimizers are for the optimizer to translate.
    """
    if not selection.rename:
        return dict(saved)
    moved: list[tuple[str, Any]] = []
    stay = _without_moved(saved, "", selection, moved)
    for path, node in moved:
        _insert(stay, live, path, node)
    return stay


def _without_moved(
    saved: Mapping[Any, Any], path: str, selection: Selection, moved: list[tuple[str, Any]]
) -> dict[Any, Any]:
    stay = {}
    for key, node in saved.items():
        where = f"{path}.{key}" if path else str(key)
        new, below = selection.renamed(where), members(node)
        if below is not None and selection.renames_below(where):
            rest = _without_moved(below, where, selection, moved)
            if below and not rest:
                continue
            node = foreign.mapping_of(rest)
        if new == where:
            stay[key] = node
        else:
            moved.append((new, node))
    return stay


def _insert(saved: dict[Any, Any], live: Any, path: str, node: Any) -> None:
    """Put a node where the live state looks for `path`: modules have flat names, dicts nested."""
    while isinstance(live, Mark):
        live = live.value
    inner = live if isinstance(live, Mapping) and not isinstance(live, nn.Module) else {}
    holders = [key for key in inner if type(key) is str and path.startswith(f"{key}.")]
    if path in inner or not holders:
        saved[path] = _united(saved.get(path), node)
        return
    key = max(holders, key=len)
    below = dict(members(saved.get(key, {})) or {})
    _insert(below, inner[key], path[len(key) + 1 :], node)
    saved[key] = foreign.mapping_of(below)


def _united(one: Any, other: Any) -> Any:
    """Two dicts that came to be in one place; else the other."""
    ours, theirs = members(one), members(other)
    if ours is None or theirs is None:
        return other
    return foreign.mapping_of({**ours, **theirs})
