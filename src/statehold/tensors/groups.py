"""Which parameter group of a step has the options for a live one.

Invariants: parameters are known by their names, neither by their order nor by their place; a step
may hold more of them than this process, as that of a pipeline does, and ranks may have had
different groups: all of them are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from statehold.format.trees import Differs
from statehold.tensors import nodes
from statehold.tensors.optimizers import PARAMS

Group = Mapping[str, Any]
Owners = Mapping[str, Sequence[Group]]


def saved_groups(node: Any) -> list[Group] | None:
    """The groups of a saved optimizer, of all ranks where they had different ones."""
    lists = node.values if isinstance(node, Differs) else (node,)
    if not all(type(each) is list for each in lists):
        return None
    return [nodes.members(group) or {} for each in lists for group in each]


def owners_of(groups: Sequence[Group]) -> Owners:
    """The groups of each saved parameter; several where ranks had different ones."""
    owners: dict[str, list[Group]] = {}
    for group in groups:
        for name in group.get(PARAMS, []):
            owners.setdefault(name, []).append(group)
    return owners


def is_by_name(groups: Sequence[Group]) -> bool:
    """Whether an optimizer was saved by the names of its parameters, not as its state_dict()."""
    return all(type(name) is str for group in groups for name in group.get(PARAMS, []))


def options_for(
    names: Sequence[str], position: int, owners: Owners, groups: Sequence[Group]
) -> Group | None:
    """The saved group for a live one that holds `names`; None where saved groups disagree.

    A live group without any saved parameter goes by its position: there may be such options.
    """
    found = list(_found(names, owners))
    if not found:
        return groups[position] if position < len(groups) else {}
    return None if differing_options(names, owners) else found[0]


def differing_options(names: Sequence[str], owners: Owners) -> list[str]:
    """The options on which the saved groups of `names` disagree."""
    found = {id(group): group for group in _found(names, owners)}
    first, *others = found.values()
    keys = dict.fromkeys(key for group in found.values() for key in group if key != PARAMS)
    return [key for key in keys if any(group.get(key) != first.get(key) for group in others)]


def _found(names: Sequence[str], owners: Owners) -> Iterator[Group]:
    return (group for name in names for group in owners.get(name, ()))
