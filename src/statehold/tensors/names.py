"""The dotted names on which a selection is asked while a state and a step are compared.

Owns: which names there are. A module's entries, an optimizer's entries by parameter and option, and
the members of dicts, lists and tuples have names of their own. An object with load_state_dict() is
one name: it is restored as a whole.
Invariants: nothing is changed or allocated.
Not here: what patterns make of the names (selection), what is restored (restore).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from statehold.format.selection import Names, Selection
from statehold.tensors import groups, modules, nodes, optimizers
from statehold.tensors.marks import Mark
from statehold.tensors.parts import is_stateful

_NOTHING = object()


def names_of(
    state: Mapping[str, Any],
    saved: Any,
    selection: Selection,
    parameters: Mapping[int, str],
) -> Names:
    """The names of a live state and of the saved tree for it.

    parameters: the names of the live parameters, by their ids.
    """
    walk = _Walk(selection, parameters)
    renamed = nodes.renamed(nodes.members(saved) or {}, state, selection)
    live = list(walk.content(state, {}, ""))
    return Names(
        taken=dict.fromkeys((*live, *walk.content(state, renamed, ""))),
        saved=list(saved_names(saved, "")),
        live=live,
        open=[path for path in _dicts(state, "") if path],
    )


def live_names(
    live: Any, path: str, selection: Selection, parameters: Mapping[int, str]
) -> Iterator[str]:
    """The names of a part of a live state, at `path`."""
    return _Walk(selection, parameters).names(live, _NOTHING, path)


def below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


class _Walk:
    def __init__(self, selection: Selection, parameters: Mapping[int, str]) -> None:
        self._selection = selection
        self._parameters = parameters

    def content(self, live: Any, saved: Mapping[Any, Any], path: str) -> Iterator[str]:
        """The names in a dict, or in what is known by keys like one; its own if it is empty."""
        known = live if isinstance(live, Mapping) else {}
        for key in dict.fromkeys((*known, *saved)):
            live_part, node = known.get(key, _NOTHING), saved.get(key, _NOTHING)
            yield from self.names(live_part, node, below(path, key))
        if path and not known and not saved:
            yield path

    def names(self, live: Any, node: Any, path: str) -> Iterator[str]:
        while isinstance(live, Mark):
            live = live.value
        if isinstance(live, nn.Module):
            names = dict.fromkeys((*modules.entries(live), *(nodes.members(node) or ())))
            yield from (f"{path}.{name}" for name in names) if names else (path,)
        elif (optimizer := optimizers.behind(live)) is not None:
            yield from self._optimizer(optimizer, node, path)
        elif isinstance(live, torch.Tensor) or is_stateful(live):
            yield path
        elif type(live) in (dict, OrderedDict) or live is _NOTHING:
            yield from self.content(live, nodes.members(node) or {}, path)
        elif type(live) in (list, tuple):
            items = node if type(node) is list else nodes.payload(node, "$tuple") or ()
            yield from self.content(dict(enumerate(live)), dict(enumerate(items)), path)
        else:
            yield path

    def _optimizer(self, live: torch.optim.Optimizer, node: Any, path: str) -> Iterator[str]:
        whole = groups.members_of(node) or {}
        found = groups.saved_groups(whole.get("param_groups", [])) or []
        if not groups.is_by_name(found):
            yield path
            return
        said = nodes.members(whole.get("state")) or {}
        states = {self._selection.renamed(name): each for name, each in said.items()}
        for _, name, parameter in optimizers.parameters(live, self._parameters):
            where, entry = f"{path}.state.{name}", nodes.members(states.pop(name, None))
            yield from self.content(live.state.get(parameter, {}), entry or {}, where)
        owners = (self._selection.renamed(name) for name in groups.owners_of(found))
        yield from (f"{path}.state.{name}" for name in (*states, *owners))
        for index, group in enumerate(live.param_groups):
            saved = found[index] if index < len(found) else {}
            for key in dict.fromkeys((*group, *saved)):
                yield f"{path}.param_groups.{index}.{key}"
        if "other" in whole or optimizers.other_state(live):
            yield f"{path}.other"


def saved_names(node: Any, path: str) -> Iterator[str]:
    """The names in a saved tree, which prefixes in `rename` are of."""
    members = nodes.members(node)
    for key, item in (members or {}).items():
        yield from saved_names(item, below(path, key))
    if path and not members:
        yield path


def _dicts(live: Any, path: str) -> Iterator[str]:
    """The dicts in a live state, which take names that they do not have."""
    while isinstance(live, Mark):
        live = live.value
    if type(live) in (dict, OrderedDict):
        yield path
        for key, part in live.items():
            yield from _dicts(part, below(path, key))
