"""Trees of dicts and lists: their leaves by dotted names, and what names make.

Invariants: dicts are entered, and lists and tuples that hold tensors or dicts. Names are joined
with dots, as those of a step are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from statehold.errors import UnsupportedValueError
from statehold.format.selection import Answer, Names, Selection, check_answers
from statehold.integrations.formats.streamed import Streamed


def leaves(
    tree: Any, path: str = "", lists: tuple[type, ...] = (list, tuple)
) -> Iterator[tuple[str, Any]]:
    """Every leaf by its name. An empty container is a leaf. lists: the kinds that are entered."""
    members = dict(enumerate(tree)) if is_entered(tree, lists) else tree
    if not isinstance(members, Mapping) or (not members and path):
        yield path, tree
        return
    for key, item in members.items():
        yield from leaves(item, f"{path}.{key}" if path else str(key), lists)


def without(tree: Mapping[Any, Any], skip: Sequence[str]) -> Any:
    """The same tree but for what patterns name. Raises UsageError for one that matches nothing."""
    selection, names = Selection(skip=skip), dict[str, None]()

    def kept(value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            return value
        found = {key: (f"{path}.{key}" if path else str(key), item) for key, item in value.items()}
        names.update(dict.fromkeys(where for where, _ in found.values()))
        return type(value)({  # type: ignore[call-arg]
            key: kept(item, where) for key, (where, item) in found.items() if selection.takes(where)
        })  # fmt: skip

    made = kept(tree, "") if skip else tree
    answers = selection.answers(Names(taken=names, saved=(), live=()))
    check_answers([Answer(answers, loads=True, has_rest=True)])
    return made


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


def is_entered(value: Any, lists: tuple[type, ...] = (list, tuple)) -> bool:
    """Whether a list or tuple holds tensors or dicts."""
    members: Any = value if isinstance(value, lists) else ()
    return any(
        isinstance(item, Mapping | Streamed | torch.Tensor) or is_entered(item, lists)
        for item in members
    )


def storable(value: Any, path: str) -> Any:
    """The same leaf. Raises UnsupportedValueError for a tensor whose bytes nobody has read."""
    if isinstance(value, torch.Tensor):
        raise UnsupportedValueError(
            "a tensor that is not plain and dense cannot be read",
            facts={"path": path, "type": type(value).__name__, "layout": str(value.layout)},
            hint="convert it with torch, and save the checkpoint again",
        )
    return value
