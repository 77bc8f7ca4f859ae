"""Which parameter group of a step has the options for a live one.

Holds: parameters are known by their names, neither by their order nor by their place; a step may
hold more of them than this process, as that of a pipeline does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statehold.state.optimizers import PARAMS

Group = Mapping[str, Any]


def options_for(
    names: Sequence[str], position: int, owners: Mapping[str, Group], groups: Sequence[Group]
) -> Group | None:
    """The saved group for a live one that holds `names`; None where saved groups disagree.

    A live group without any saved parameter goes by its position: there may be such options.
    """
    found = [owners[name] for name in names if name in owners]
    if not found:
        return groups[position] if position < len(groups) else {}
    first = found[0]
    return first if all(_same(first, each) for each in found) else None


def owners_of(groups: Sequence[Group]) -> dict[str, Group]:
    """The group of each saved parameter."""
    return {name: group for group in groups for name in group.get(PARAMS, [])}


def is_by_name(groups: Sequence[Group]) -> bool:
    """Whether an optimizer was saved by the names of its parameters, not as its state_dict()."""
    return all(type(name) is str for group in groups for name in group.get(PARAMS, []))


def differing_options(names: Sequence[str], owners: Mapping[str, Group]) -> list[str]:
    """The options on which the saved groups of `names` disagree."""
    found = [owners[name] for name in names if name in owners]
    keys = dict.fromkeys(key for group in found for key in group if key != PARAMS)
    return [key for key in keys if any(g.get(key) != found[0].get(key) for g in found)]


def _same(one: Group, other: Group) -> bool:
    return one is other or all(one.get(key) == other.get(key) for key in {*one, *other} - {PARAMS})
