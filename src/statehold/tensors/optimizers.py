"""How torch optimizers keep their state: by parameter, in groups, under running indices.

An optimizer is saved by the names of its parameters, so that neither the order of groups in
memory nor the index that Optimizer.state_dict() would give matters to a restore:
    {"state": {parameter name: {key: value}}, "param_groups": [{option: value, "params": [name]}],
     "other": {key: value}}
"other" is what the optimizer keeps in its state under keys that are no parameters, if anything.
A parameter that no module in the state holds is named by its running index, as torch does.
An optimizer whose class or hooks change what state_dict() means is saved through that instead,
unless it has gathered_state(), because its state lies elsewhere than in `state`.
A wrapper around an optimizer, such as those of Accelerate and Lightning Fabric, is looked through:
names are the same with and without it.

Which parameter group of a step has the options for a live one.

Owns also: the forms in which torch.distributed.checkpoint has an optimizer, as the form of a step.
Invariants: parameters are known by their names, neither by their order nor by their place; a step
may hold more of them than this process, as that of a pipeline does, and ranks may have had
different groups: all of them are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from operator import is_
from typing import Any, Protocol, runtime_checkable

import torch

from statehold.encoding import values
from statehold.format.trees import Differs
from statehold.tensors import nodes
from statehold.tensors.storable import device_of, local_of

# -- the state of an optimizer ---------------------------------------------------------------------


PARAMS = "params"
STATE, GROUPS = "state", "param_groups"
# Where wrappers keep the optimizer that they wrap.
_WRAPPED = ("optimizer", "_optimizer")
_HOOKS = tuple(
    f"_optimizer_{action}_{when}_hooks"
    for action in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)


@runtime_checkable
class GathersState(Protocol):
    """An optimizer whose `state` is empty, because it keeps its state elsewhere."""

    @property
    def has_lost_state(self) -> bool:
        """Whether it has none until it gets one: state_dict() and gathered_state() raise."""

    def gathered_state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Copies of all that `state` would have, by parameter."""


def behind(value: Any) -> torch.optim.Optimizer | None:
    """The optimizer that `value` is, or around which it is a wrapper; None for anything else."""
    while (inner := _wrapped(value)) is not None:
        value = inner
    return value if isinstance(value, torch.optim.Optimizer) else None


def _wrapped(value: Any) -> torch.optim.Optimizer | None:
    """The optimizer to which `value` passes everything on, if it does."""
    for name in _WRAPPED:
        inner = getattr(value, "__dict__", {}).get(name)
        if isinstance(inner, torch.optim.Optimizer) and _passes_on(value, inner):
            return inner
    return None


def _passes_on(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    """Whether a wrapper has no state of its own: groups and state are those of `inner`, the same
    objects, and its state_dict() shows nothing else."""
    if getattr(wrapper, GROUPS, None) is not inner.param_groups:
        return False
    if getattr(wrapper, STATE, None) is not inner.state:
        return False
    if isinstance(behind(inner), GathersState):
        return _shows(wrapper, inner)
    shown, expected = wrapper.state_dict(), inner.state_dict()
    return shown.keys() == expected.keys() and _same_entries(shown[STATE], expected[STATE])


def _shows(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    """Whether its state_dict() is that of `inner`, which is not asked: it would read all state."""
    stand_in = {STATE: {0: {"value": object()}}, GROUPS: [{PARAMS: [0]}]}
    vars(inner)["state_dict"] = lambda: stand_in
    try:
        return bool(wrapper.state_dict() == stand_in)
    except Exception:  # it needs more of a state_dict(), so it does something with it
        return False
    finally:
        del vars(inner)["state_dict"]


def _same_entries(shown: Mapping[Any, Any], expected: Mapping[Any, Any]) -> bool:
    """Whether two parts of state_dict() hold the same objects."""
    if shown.keys() != expected.keys():
        return False
    return all(
        _same_entries(shown[key], value) if isinstance(value, dict) else shown[key] is value
        for key, value in expected.items()
    )


def is_state_dict(value: Any) -> bool:
    """Whether a value, or the members of a node, have the form of Optimizer.state_dict()."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get(STATE), Mapping)
        and isinstance(value.get(GROUPS), list)
        and all(isinstance(group, Mapping) for group in value[GROUPS])
    )


def is_by_name(shown: Any) -> bool:
    """Whether a state_dict() calls parameters by names; torch's own calls them by numbers."""
    return is_state_dict(shown) and all(
        type(name) is str for group in shown[GROUPS] for name in group.get(PARAMS, ())
    )


def keys_by_parameter(
    optimizer: torch.optim.Optimizer, shown: Any
) -> dict[torch.Tensor, Any] | None:
    """What its state_dict() calls each parameter, in their order; None where that cannot be told
    from the places in the groups."""
    if not is_state_dict(shown):
        return None
    live = [group[PARAMS] for group in optimizer.param_groups]
    keys = [group.get(PARAMS) for group in shown[GROUPS]]
    if not all(isinstance(each, list) for each in keys) or [*map(len, keys)] != [*map(len, live)]:
        return None
    return {
        parameter: key
        for parameters, names in zip(live, keys, strict=True)
        for parameter, key in zip(parameters, names, strict=True)
    }


def is_standard(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state lies where torch.optim.Optimizer keeps it."""
    kind = type(optimizer)
    return (
        kind.state_dict is torch.optim.Optimizer.state_dict
        and kind.load_state_dict is torch.optim.Optimizer.load_state_dict
        and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    )


def is_known_by_name(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state can be saved by the names of parameters, without its state_dict()."""
    return is_standard(optimizer) or isinstance(optimizer, GathersState)


def parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(group index, name, parameter) of every parameter, in the order of the groups."""
    running = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group[PARAMS]:
            yield index, names.get(id(parameter), str(running)), parameter
            running += 1


def names_of(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[list[list[str]], list[torch.Tensor]]:
    """The names of the parameters of each group, as parameters() has them, and all parameters."""
    found: list[torch.Tensor] = []
    by_group: list[list[str]] = []
    for group in optimizer.param_groups:
        ids = list(map(id, group[PARAMS]))
        try:
            known = list(map(names.__getitem__, ids))
        except KeyError:  # no module in the state has it
            known = list(map(names.get, ids, map(str, count(len(found)))))
        by_group.append(known)
        found += group[PARAMS]
    return by_group, found


def states_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> list[Any | None]:
    """What the optimizer keeps for each of its parameters; None where it keeps nothing."""
    state: Mapping[torch.Tensor, Any] = optimizer.state
    if isinstance(optimizer, GathersState):
        state = optimizer.gathered_state()
    if len(state) == len(parameters) and all(map(is_, state, parameters)):
        return list(state.values())  # hashing a tensor takes long
    return [state.get(parameter) for parameter in parameters]


def owned_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that only step() changes: the parameters and the state at its top level."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    return parameters + state_tensors(optimizer)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors at the top level of the state of each parameter."""
    dicts = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = chain.from_iterable(state.values() for state in dicts)
    return [value for value in values if isinstance(value, torch.Tensor)]


def other_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The entries of the state whose keys are no parameters, such as a common step."""
    kinds = set(map(type, optimizer.state))
    if all(issubclass(kind, torch.Tensor) for kind in kinds):
        return {}
    return {
        key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)
    }


def state_device(group: Mapping[str, Any], key: str, parameter: torch.Tensor) -> torch.device:
    """Where a state tensor lives that has to be made: with its parameter.

    Only `step` stays on the host, unless the update reads it on the device (torch.optim.Optimizer
    .load_state_dict has the same rule).
    """
    on_device = group.get("capturable") or group.get("fused")
    if key == "step" and not on_device:
        return torch.device("cpu")
    return device_of(local_of(parameter))


# -- parameter groups of a step --------------------------------------------------------------------


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


def are_by_name(groups: Sequence[Group]) -> bool:
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
