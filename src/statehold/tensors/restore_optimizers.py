"""Match an optimizer of the live state with a saved one, parameter by parameter.

Owns: which saved entries a parameter gets, which options a group gets, and in what kind of tensors;
the translation between the two forms in which an optimizer is saved, by name and as its own
state_dict().
Invariants: parameters are known by their names where these were saved, else by their places as in
torch; what is made for a sharded parameter is sharded as it is; nothing live changes before
Restoration.finish().
Not here: how an optimizer keeps its state, which saved group is meant (optimizers).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from statehold.encoding import values
from statehold.layout.layout import Box
from statehold.tensors import nodes, optimizers, placements
from statehold.tensors.composed import is_composed
from statehold.tensors.matching import ABSENT, HOST, Matching, missing_of, replace_content
from statehold.tensors.optimizers import GROUPS, PARAMS, STATE, Group, Owners
from statehold.tensors.placements import Placed
from statehold.tensors.storable import device_of, is_dtensor, local_of
from statehold.tensors.stored import InStep, StreamedOptimizer


@dataclass(frozen=True, slots=True)
class _Named:
    """An optimizer of the step by the names of its parameters, which are the live ones."""

    states: Mapping[str, Any]
    groups: Sequence[Group]
    owners: Owners
    other: Any


class OptimizerMatching(Matching):
    """The part of a comparison that is about optimizers."""

    def _optimizer(self, live: torch.optim.Optimizer, node: Any, path: str) -> None:
        node = node if (form := optimizers.members_of(node)) is None else values.mapping_of(form)
        saved = self._named(live, node)
        self.restoration.trains = True
        if saved is not None and self._streamed(live, saved, path):
            return
        if not optimizers.is_standard(live):
            shown = self._shown(live, saved, path)
            if saved is not None and not optimizers.is_by_name(shown):
                self._translated(live, shown, saved, path)
            else:
                self._handed_over(live, shown, node, path)
        elif saved is not None:
            self._in_place(live, saved, path)
        elif None not in _parts_of(node):
            self._handed_over(live, live.state_dict(), node, path)
        else:
            self.problem(path, "the state of an optimizer", "a value of another kind")

    def _shown(self, live: torch.optim.Optimizer, saved: _Named | None, path: str) -> Any:
        """Its state_dict(). Of one that has lost its state only the groups, if it gets all of the
        state of the step."""
        if saved is not None and isinstance(live, optimizers.GathersState) and live.has_lost_state:
            names = (
                f"{path}.{STATE}.{name}.{key}"
                for name, state in saved.states.items()
                for key in nodes.members(state) or {}
            )
            if all(map(self._selection.takes, names)):
                return torch.optim.Optimizer.state_dict(live)
        return live.state_dict()

    def _named(self, live: torch.optim.Optimizer, node: Any) -> _Named | None:
        """What was saved by the names of parameters; None for a state_dict()."""
        states, found = _parts_of(node)
        if states is None or found is None or not optimizers.are_by_name(found):
            return None
        renamed = self._renaming(live, optimizers.owners_of(found))
        saved = [{**group, PARAMS: list(map(renamed, group.get(PARAMS, [])))} for group in found]
        states = {renamed(name): each for name, each in states.items()}
        other = (nodes.members(node) or {}).get("other", {})
        return _Named(states, saved, optimizers.owners_of(saved), other)

    def _renaming(self, live: torch.optim.Optimizer, saved: Owners) -> Callable[[str], str]:
        """From saved names of parameters to live ones. Torch's get_state_dict() leaves the name of
        the model out of them."""
        renamed = self._selection.renamed
        full = {name for _, name, _ in optimizers.parameters(live, self._names)}
        if not full.isdisjoint(map(renamed, saved)):
            return renamed
        heads = sorted((f"{path}." for path in self._modules), key=len, reverse=True)
        found: dict[str, list[str]] = {}
        for name in full:
            head = next((each for each in heads if name.startswith(each)), "")
            found.setdefault(name.removeprefix(head), []).append(name)
        full_by_inner = {inner: names[0] for inner, names in found.items() if len(names) == 1}
        return lambda name: full_by_inner.get(inner := renamed(name), inner)

    def _in_place(self, live: torch.optim.Optimizer, saved: _Named, path: str) -> None:
        """Fill the tensors of a live optimizer, and put what is missing beside them."""
        options = self._take_options(live, saved, path)
        content = self._content(live, live.state, saved, options, path)
        others = self._others(optimizers.other_state(live), saved, path)
        self.restoration.containers.append(lambda: _set_optimizer_state(live, content, others))

    def _take_options(
        self, live: torch.optim.Optimizer, saved: _Named, path: str
    ) -> list[Mapping[str, Any]]:
        """Have each live group take its saved options, which are returned."""
        options = self._options(live, saved, path)
        for index, group in enumerate(live.param_groups):
            values = self._group(group, options[index], f"{path}.{GROUPS}.{index}")
            self.restoration.containers.append(partial(group.update, values))
        return options

    # -- piece by piece ----------------------------------------------------------------------

    def _streamed(self, live: torch.optim.Optimizer, saved: _Named, path: str) -> bool:
        """Have a live optimizer read its state by itself; False if it cannot read all of it."""
        if not isinstance(live, StreamedOptimizer) or not self._selection.is_everything:
            return False
        found = list(optimizers.parameters(live, self._names))
        if saved.other or {name for _, name, _ in found} != set(saved.owners):
            return False
        states = {
            index: self._pieces(saved.states[name], parameter, f"{path}.{STATE}.{name}")
            for index, (_, name, parameter) in enumerate(found)
            if name in saved.states
        }
        if None in states.values():
            return False
        self._take_options(live, saved, path)
        memory, restoration = self._memory, self.restoration
        for _, name, _ in found:
            members = nodes.members(saved.states.get(name)) or {}
            restoration.loaded += [f"{path}.{STATE}.{name}.{key}" for key in members]
        content: dict[int, dict[str, Any]] = {
            index: {
                key: memory.make(each, HOST) if isinstance(each, str) else each
                for key, each in (state or {}).items()
            }
            for index, state in states.items()
        }
        pieces = (each for state in content.values() for each in state.values())
        names = {each.name for each in pieces if isinstance(each, InStep)}
        restoration.streamed |= names
        memory.used |= names
        restoration.streams.append(lambda fill: live.load_stored(content, fill))
        return True

    def _pieces(
        self, node: Any, parameter: torch.Tensor, path: str
    ) -> dict[str, InStep | str] | None:
        """The fields of a parameter in the step, and the names of its numbers; None if the state
        is of another kind."""
        found: dict[str, InStep | str] = {}
        place = self._memory.place(parameter, path)
        if not local_of(parameter).is_contiguous():
            return None  # a step has its tensors in another order
        for key, each in (nodes.members(node) or {}).items():
            name = nodes.payload(each, "$tensor")
            if name is None or self._memory.dtype_of(name) != torch.float32:
                return None
            shape = self._memory.shape_of(name)
            if shape == tuple(parameter.shape) and key != "step":
                found[key] = InStep(name, place.box or Box.whole(shape))
            elif shape == ():
                found[key] = name
            else:
                return None
        return found

    # -- by name -----------------------------------------------------------------------------

    def _options(
        self, live: torch.optim.Optimizer, saved: _Named, path: str
    ) -> list[Mapping[str, Any]]:
        """The saved options for each live group, which they will replace."""
        names: list[list[str]] = [[] for _ in live.param_groups]
        for index, name, _ in optimizers.parameters(live, self._names):
            names[index].append(name)
        found: list[Mapping[str, Any]] = []
        for index in range(len(live.param_groups)):
            options = optimizers.options_for(names[index], index, saved.owners, saved.groups)
            if options is None:
                differing = ", ".join(optimizers.differing_options(names[index], saved.owners))
                got = f"parameters of several groups, which differ in {differing}"
                where = f"{path}.{GROUPS}.{index}"
                self.problem(where, "the options of one group of the step", got)
            self._check_options(live, index, options or {}, f"{path}.{GROUPS}.{index}")
            found.append(options or {})
        return found

    def _check_options(
        self, live: torch.optim.Optimizer, index: int, saved: Mapping[str, Any], path: str
    ) -> None:
        """Refuse a saved group of another kind of optimizer: each side has options of its own.

        Options of one side alone are no sign of that: another version of torch added them, or a
        scheduler. A step that holds none says nothing.
        """
        group = live.param_groups[index]
        takes = self._selection.takes
        unknown = [key for key in missing_of(saved, group) if takes(f"{path}.{key}")]
        lacking = [key for key in missing_of(live.defaults, saved) if key in group]
        if saved and unknown and lacking:
            self.restoration.missing += [f"{path}.{key}" for key in lacking]
            self.restoration.unexpected += [f"{path}.{key}" for key in unknown]
            if self._selection.strict:
                ours = f"the options of {type(live).__name__} ({', '.join(lacking)})"
                theirs = f"those of another kind of optimizer ({', '.join(unknown)})"
                self.problem(path, ours, theirs)

    def _group(
        self, live: Mapping[str, Any], saved: Mapping[str, Any], path: str
    ) -> dict[str, Any]:
        """The saved options that replace the live ones; those the step lacks stay."""
        options = {}
        for key, node in saved.items():
            where = f"{path}.{key}"
            if key == PARAMS or not self._takes(where) or self._differs(node, where):
                continue
            options[key] = self.rebuild(live.get(key, ABSENT), node)
        return options

    def _content(
        self,
        live: torch.optim.Optimizer,
        current: Mapping[torch.Tensor, Any],
        saved: _Named,
        options: list[Mapping[str, Any]],
        path: str,
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """The entries for each parameter that is restored; `current` are those that it has."""
        content: dict[torch.Tensor, dict[str, Any]] = {}
        ours = set()
        for index, name, parameter in optimizers.parameters(live, self._names):
            where = f"{path}.{STATE}.{name}"
            ours.add(name)
            if not self._selection.reaches(where):
                self.restoration.kept.append(where)
            elif name not in saved.owners:
                own = (where, *(f"{where}.{key}" for key in current.get(parameter, ())))
                if any(map(self._selection.takes, own)):
                    self.missing(where, "a parameter of the step's optimizer", "nothing")
                else:
                    self.restoration.kept.append(where)
            elif not self._differs(saved.states.get(name), where):
                known = nodes.members(saved.states.get(name)) or {}
                merged = {**live.param_groups[index], **options[index]}
                has = current.get(parameter, {})
                content[parameter] = self._parameter_state(has, merged, parameter, known, where)
        for name in missing_of(saved.owners, ours):
            self.unexpected(f"{path}.{STATE}.{name}", "a parameter of the step's optimizer")
        return content

    def _others(self, live: dict[Any, Any], saved: _Named, path: str) -> dict[Any, Any]:
        """The entries whose keys are no parameters."""
        if self._differs(saved.other, f"{path}.other") or not self._selection.takes(path):
            return live
        others: dict[Any, Any] = self.rebuild(live, saved.other)
        return others

    def _parameter_state(
        self,
        current: Mapping[str, Any],
        options: Mapping[str, Any],
        parameter: torch.Tensor,
        saved: Mapping[str, Any],
        path: str,
    ) -> dict[str, Any]:
        beside = self._memory.place(parameter, path)
        content = {}
        for key in dict.fromkeys((*saved, *current)):
            where = f"{path}.{key}"
            if not self._selection.takes(where):
                self.restoration.kept.append(where)
                if key in current:
                    content[key] = current[key]
            elif key in saved:
                self.restoration.loaded.append(where)
                device = optimizers.state_device(options, key, parameter)
                value = current.get(key, ABSENT)
                content[key] = self._beside(value, saved[key], parameter, beside, key, device)
        return content

    def _beside(
        self,
        live: Any,
        node: Any,
        parameter: torch.Tensor,
        beside: Placed,
        key: str,
        device: torch.device,
    ) -> Any:
        """One entry of the state of a parameter, which lies where `beside` says."""
        name = nodes.payload(node, "$tensor")
        if name is None:
            if not is_composed(node) or not isinstance(live, torch.Tensor):
                return self.rebuild(live, node, device, parameter)
            where = None if is_dtensor(live) else placements.beside(live, parameter, beside)
            return self._compose(live, node, device, parameter, where)
        if isinstance(live, torch.Tensor) and not (
            key == "step" and device_of(local_of(live)) != device
        ):
            place = None if is_dtensor(live) else placements.beside(live, parameter, beside)
            if self._memory.usable(live, name, place):
                return live
        return self._memory.make(name, device, parameter)

    # -- through load_state_dict() -----------------------------------------------------------

    def _translated(
        self, live: torch.optim.Optimizer, shown: Any, saved: _Named, path: str
    ) -> None:
        """Hand what was saved by name to an optimizer with a state_dict() of its own."""
        keys = optimizers.keys_by_parameter(live, shown)
        if keys is None:
            got = "the state of an optimizer by the names of its parameters"
            self.problem(path, f"what the state_dict() of {type(live).__name__} returns", got)
            return
        options = self._options(live, saved, path)
        states = dict(shown[STATE])
        current = {parameter: states.pop(key, {}) for parameter, key in keys.items()}
        found = [
            {**group, **self._group(group, options[index], f"{path}.{GROUPS}.{index}")}
            for index, group in enumerate(shown[GROUPS])
        ]
        content = {**current, **self._content(live, current, saved, options, path)}
        states = self._others(states, saved, path)
        states |= {keys[parameter]: entries for parameter, entries in content.items() if entries}
        for key in missing_of(shown, (STATE, GROUPS)):
            if self._selection.takes(f"{path}.{key}"):
                self.missing(f"{path}.{key}", "an entry of the step", "nothing")
        value = {**shown, STATE: states, GROUPS: found}
        self.restoration.objects.append(lambda: live.load_state_dict(value))

    def _handed_over(self, live: torch.optim.Optimizer, shown: Any, node: Any, path: str) -> None:
        """Hand what its state_dict() returned to an optimizer, in tensors as its parameters are."""
        if not self._takes(path) or self._differs(node, path):
            return
        rest = dict(nodes.members(node) or {})
        owners = self._owners(live, shown, rest, path)
        has = shown if isinstance(shown, Mapping) else {}
        value: Any = {}
        if owners:
            current = has[STATE]
            value[STATE] = {
                key: self.rebuild(current.get(key, ABSENT), entries, HOST, owners.get(key))
                for key, entries in (nodes.members(rest.pop(STATE)) or {}).items()
            }
        known = set(self._memory.made_plain)
        if nodes.members(node) is None:
            value = self.rebuild(shown, node)
        for key, each in rest.items():
            value[key] = self.rebuild(has.get(key, ABSENT), each)
        self._check_kinds(live, self._memory.made_plain - known, path)
        self.restoration.objects.append(lambda: live.load_state_dict(value))

    def _owners(
        self, live: torch.optim.Optimizer, shown: Any, saved: Mapping[str, Any], path: str
    ) -> dict[Any, torch.Tensor]:
        """The parameters by the keys of their saved state; none where these say nothing."""
        keys = optimizers.keys_by_parameter(live, shown)
        if keys is None or not optimizers.is_state_dict(saved):
            return {}
        if optimizers.is_by_name(shown):
            return {key: parameter for parameter, key in keys.items()}
        sizes = [len(group[PARAMS]) for group in live.param_groups]
        places = [(nodes.members(group) or {}).get(PARAMS, []) for group in saved[GROUPS]]
        if list(map(len, places)) == sizes:
            return dict(zip(itertools.chain(*places), keys, strict=True))
        if optimizers.is_standard(live):
            got = f"groups of {', '.join(str(len(each)) for each in places)} in the step"
            self.problem(f"{path}.{GROUPS}", f"groups of {', '.join(map(str, sizes))}", got)
        return {}

    def _check_kinds(self, live: torch.optim.Optimizer, made: set[str], path: str) -> None:
        """Refuse plain tensors where they may well stand for pieces of sharded parameters."""
        sharded = [each for group in live.param_groups for each in group[PARAMS]]
        sharded = [each for each in sharded if is_dtensor(each)]
        for name in sorted(made):
            if any(self._memory.has_shape_of(parameter, name) for parameter in sharded):
                expected = (
                    f"a live DTensor in what the state_dict() of {type(live).__name__} returns"
                )
                got = "none, and nothing says which parameter it belongs to: take one step before "
                self.problem(name, expected, f"{got}restoring, so that the optimizer has its state")


def _parts_of(node: Any) -> tuple[dict[Any, Any] | None, list[Group] | None]:
    """The states and the groups of a saved optimizer, None for what it lacks."""
    whole = nodes.members(node) or {}
    return nodes.members(whole.get(STATE)), optimizers.saved_groups(whole.get(GROUPS))


def _set_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[torch.Tensor, dict[str, Any]],
    others: Mapping[Any, Any],
) -> None:
    """Give every parameter exactly the saved entries, in the dicts that are already there."""
    for key in optimizers.other_state(optimizer).keys() - others.keys():
        del optimizer.state[key]
    optimizer.state.update(others)
    for parameter, saved in state.items():
        if not saved:
            optimizer.state.pop(parameter, None)
            continue
        replace_content(optimizer.state[parameter], saved)
