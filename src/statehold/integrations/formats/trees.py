"""Trees of dicts and lists: their leaves by dotted names, and what names make.

Invariants: dicts are entered, and lists and tuples that hold tensors or dicts. Names are joined
with dots, as those of a step are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from statehold.integrations.formats.streamed import Streamed


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf by its name. An empty container is a leaf."""
    members = dict(enumerate(tree)) if is_entered(tree) else tree
    if not isinstance(members, Mapping) or (not members and path):
        yield path, tree
        return
    for key, item in members.items():
        yield from leaves(item, f"{path}.{key}" if path else str(key))


def nbytes_of(tree: Any) -> int:
    """The bytes of the tensors of a tree, each counted once."""
    found = {value for _, value in leaves(tree) if isinstance(value, Streamed)}
    return sum(tensor.nbytes for tensor in found)


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with `change(leaf)` in the place of each leaf."""
    kind: Any = type(tree)
    if isinstance(tree, Mapping):
        return kind({key: replaced(item, change) for key, item in tree.items()})
    if kind in (list, tuple):
        return kind(replaced(item, change) for item in tree)
    return change(tree)


def nested(items: Iterable[tuple[tuple[Any, ...], Any]]) -> Any:
    """The tree with each value at its path: dicts by str, lists by the numbers from 0 on."""
    tree: dict[Any, Any] = {}
    for path, value in items:
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return _closed(tree)


def _closed(tree: Any) -> Any:
    if type(tree) is not dict:
        return tree
    made = {key: _closed(item) for key, item in tree.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made


def is_entered(value: Any) -> bool:
    """Whether a list or tuple holds tensors or dicts."""
    return isinstance(value, list | tuple) and any(
        isinstance(item, Mapping | Streamed | torch.Tensor) or is_entered(item) for item in value
    )
