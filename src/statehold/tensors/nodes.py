"""Looking into the saved tree: members of dicts, tags, places where ranks differ, renaming; groups
of optimizers, also in the forms of torch.distributed.checkpoint; the nodes of values of torch and
NumPy that are no tensors: sizes, dtypes, scalars, arrays.

Invariants: nothing here changes a node that it was given.

Not here: plain Python values (encoding.values), tensors (captured), what becomes of nodes
(matching).
"""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from statehold.encoding import values
from statehold.errors import ManifestError, StateMismatchError, UnsupportedValueError
from statehold.format.selection import Selection
from statehold.format.trees import Differs
from statehold.tensors import dtypes
from statehold.tensors.marks import bare


def members(node: Any) -> dict[Any, Any] | None:
    """The members of a saved dict, whichever way it was encoded; None for anything else."""
    if type(node) is not dict:
        return None
    if not tag(node):
        return node
    pairs = node.get("$dict", node.get("$ordered"))
    return None if pairs is None else {key_of(key): item for key, item in pairs}


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


def check_same(node: Any, hint: str, **facts: Any) -> None:
    """Raise StateMismatchError for a node in which ranks differ."""
    if (found := differing(node)) is not None:
        facts["saved"] = str(found)
        text = "ranks saved different values under one name"
        raise StateMismatchError(text, facts=facts, hint=hint)


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
            node = mapping_of(rest)
        if new == where:
            stay[key] = node
        else:
            moved.append((new, node))
    return stay


def _insert(saved: dict[Any, Any], live: Any, path: str, node: Any) -> None:
    """Put a node where the live state looks for `path`: modules have flat names, dicts nested."""
    live = bare(live)
    inner = live if isinstance(live, Mapping) and not isinstance(live, nn.Module) else {}
    holders = [key for key in inner if type(key) is str and path.startswith(f"{key}.")]
    if path in inner or not holders:
        within = members(node) if isinstance(live, nn.Module) else None
        if within and any(f".{name}".endswith(f".{path}") for name, _ in live.named_modules()):
            saved |= {f"{path}.{name}": item for name, item in within.items()}
        else:
            saved[path] = _united(saved.get(path), node)
        return
    key = max(holders, key=len)
    below = dict(members(saved.get(key, {})) or {})
    _insert(below, inner[key], path[len(key) + 1 :], node)
    saved[key] = mapping_of(below)


def _united(one: Any, other: Any) -> Any:
    """Two dicts that came to be in one place; else the other."""
    ours, theirs = members(one), members(other)
    if ours is None or theirs is None:
        return other
    return mapping_of({**ours, **theirs})


# -- optimizers of a step --------------------------------------------------------------------------


PARAMS = "params"
STATE, GROUPS, OTHER = "state", "param_groups", "other"
Group = Mapping[str, Any]
_FLAT = (f"{STATE}.", f"{GROUPS}.")
Owners = Mapping[str, Sequence[Group]]


def members_of_optimizer(node: Any) -> dict[Any, Any] | None:
    """The members of a saved optimizer in the form of a step; None for a value of another kind.

    DCP makes texts of the numbers of parameters, and torch's flatten_optimizer_state_dict has names
    such as "state.0.weight.exp_avg" and "param_groups.0.weight.lr" instead of dicts.
    """
    found = members(node)
    if is_flat(found):
        return _unflattened(found or {})
    states = members((found or {}).get(STATE))
    of_groups = saved_groups((found or {}).get(GROUPS, [])) or []
    known = chain.from_iterable(group.get(PARAMS, []) for group in of_groups)
    numbers = {str(key): key for key in known if type(key) is int}
    if found is None or not states or not numbers:
        return found
    return {**found, STATE: mapping_of({numbers.get(k, k): v for k, v in states.items()})}


def is_flat(found: Any) -> bool:
    """Whether a state_dict(), or the members of a node, have such names instead of dicts."""
    return (
        isinstance(found, Mapping)
        and bool(found)
        and all(type(key) is str and key.startswith(_FLAT) for key in found)
    )


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
    return [members(group) or {} for each in lists for group in each]


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
    names: Sequence[Sequence[str]], position: int, owners: Owners, groups: Sequence[Group]
) -> tuple[Group, list[str]]:
    """The saved group for the live one at `position`, and the options in which it differs from
    other saved groups of its parameters. names: those of each live group.

    A live group without any saved parameter goes by its position, because there may be such
    options, unless the group there is that of another one.
    """
    owning = [owners.get(name, ()) for name in names[position]]
    found = list({id(group): group for group in chain(*owning)}.values())
    if not found:
        there = groups[position] if position < len(groups) else {}
        return {} if set(chain(*names)) & set(there.get(PARAMS, ())) else there, []
    first, *others = found
    keys = dict.fromkeys(key for group in found for key in group if key != PARAMS)
    return first, [key for key in keys if any(each.get(key) != first.get(key) for each in others)]


# -- values of torch and NumPy that are no tensors -------------------------------------------------


def torch_node(value: Any) -> Any | None:
    """The node of a torch.Size, dtype or device, or the text of a path; None for anything else."""
    if isinstance(value, PurePath):
        return values.encode(str(value), "")
    if isinstance(value, torch.Size):
        return {"$torch": {"size": list(value)}}
    if isinstance(value, torch.dtype):
        return {"$torch": {"dtype": str(value).removeprefix("torch.")}}
    if isinstance(value, torch.device):
        return {"$torch": {"device": str(value)}}
    return None


def numpy_node(value: Any, path: str, add: Callable[[torch.Tensor, str], str]) -> Any | None:
    """The node of a NumPy number or array; None for anything else, and for what has no dtype of a
    step. add: takes the elements of an array, and returns the name of that tensor."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return scalar_node(value)
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    found = array_of(value, path)
    if found is None:
        return None
    array, is_complex = found
    node = {"$ndarray": add(array, path)}
    return {"$complex128": node} if is_complex else node


def scalar_node(value: Any) -> Any | None:
    """The node of a NumPy scalar; None where its dtype cannot be stored."""
    name = value.dtype.name
    if not dtypes.is_numpy_scalar(name):
        return None
    little = value.astype(value.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"$npscalar": {"dtype": name, "bytes": data}}


def array_of(value: Any, path: str) -> tuple[torch.Tensor, bool] | None:
    """A private copy of a NumPy array as a tensor, and whether that has pairs for complex128; None
    for an array of a subclass. Raises UnsupportedValueError for a dtype that no step can hold."""
    if type(value).__name__ != "ndarray":
        return None
    known = value.dtype.name == "complex128" or value.dtype.name in dtypes.NUMPY_TO_TORCH
    if not known or not value.dtype.isnative:
        raise UnsupportedValueError(
            "a NumPy array has a dtype that no step can hold",
            facts={"path": path, "dtype": str(value.dtype)},
            hint="convert it with astype() to a number type in native byte order",
        )
    # A copy: a tensor cannot borrow read-only arrays or those with negative strides.
    array = torch.from_numpy(value.copy(order="C"))
    is_complex = array.dtype == torch.complex128
    return (torch.view_as_real(array) if is_complex else array), is_complex


def mapping_of(members: dict[Any, Any]) -> Any:
    """The node of a dict of nodes, with any key that key_of gives."""
    return values.mapping_of(members, lambda key, path: torch_node(key) or scalar_node(key))


def value_of(tag: str, payload: Any) -> Any:
    """The value of a node of NumPy or torch that is not a tensor. Raises ManifestError."""
    if tag == "$npscalar":
        return _numpy_scalar(payload["dtype"], base64.b64decode(payload["bytes"]))
    if "size" in payload:
        return torch.Size(payload["size"])
    if "device" in payload:
        return torch.device(payload["device"])
    dtype = getattr(torch, payload["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError("no such torch dtype", facts={"got": payload["dtype"]})
    return dtype


def _numpy_scalar(name: str, raw: bytes) -> Any:
    numpy = importlib.import_module("numpy")
    expected = numpy.dtype(name).itemsize if dtypes.is_numpy_scalar(name) else None
    if len(raw) != expected:
        raise ManifestError(
            "no such NumPy scalar",
            facts={"dtype": name, "expected": f"{expected} bytes", "got": f"{len(raw)} bytes"},
        )
    return numpy.frombuffer(raw, dtype=numpy.dtype(name).newbyteorder("<")).astype(name)[0]


# The key of a dict that a node means: all readers of a tree decode its keys here.
key_of = partial(values.decode, leaf=value_of)
