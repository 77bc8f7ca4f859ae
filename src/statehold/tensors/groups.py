"""Which parameter group of a step has the options for a live one.

Owns also: the forms in which torch.distributed.checkpoint has an optimizer, as the form of a step.
Invariants: parameters are known by their names, neither by their order nor by their place; a step
may hold more of them than this process, as that of a pipeline does, and ranks may have had
different groups: all of them are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from statehold.encoding import values
from statehold.format.trees import Differs
from statehold.tensors import nodes
from statehold.tensors.optimizers import GROUPS, PARAMS, STATE

Group = Mapping[str, Any]
_FLAT = (f"{STATE}.", f"{GROUPS}.")
Owners = Mapping[str, Sequence[Group]]


def members_of(node: Any) -> dict[Any, Any] | None:
    """The members of a saved optimizer in the form of a step; None for a value of another kind.

    DCP makes texts of the numbers of parameters, and torch's flatten_optimizer_state_dict has names
    such as "state.0.weight.exp_avg" and "param_groups.0.weight.lr" instead of dicts.
    """
    found = nodes.members(node)
    if found and all(type(key) is str and key.startswith(_FLAT) for key in found):
        return _unflattened(found)
    states = nodes.members((found or {}).get(STATE))
    of_groups = saved_groups((found or {}).get(GROUPS, [])) or []
    numbers = {str(key): key for group in of_groups for key in _numbers_in(group)}
    if found is None or not states or not numbers:
        return found
    return {**found, STATE: values.mapping_of({numbers.get(k, k): v for k, v in states.items()})}


def _numbers_in(group: Group) -> list[int]:
    return [key for key in group.get(PARAMS, []) if type(key) is int]


def _unflattened(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, dict[str, dict[str, Any]]] = {STATE: {}, GROUPS: {}}
    for path, node in flat.items():
        part, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        found[part].setdefault(name, {})[key] = node
    groups = [{**options, PARAMS: [name]} for name, options in found[GROUPS].items()]
    return {STATE: found[STATE], GROUPS: groups}


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
