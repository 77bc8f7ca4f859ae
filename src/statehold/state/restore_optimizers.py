"""Match an optimizer of the live state with a saved one, parameter by parameter.

Owns: which saved entries a parameter gets, which options a group gets, and in what kind of tensors.
Holds: parameters are known by their names; what is made for a sharded parameter is sharded as it
is; nothing live changes before Restoration.finish().
Not here: how an optimizer keeps its state (optimizers), which saved group is meant (groups).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from statehold.state import groups, nodes, optimizers, placements
from statehold.state.matching import ABSENT, Matching, missing_of, replace_content
from statehold.state.placements import Placed
from statehold.state.tensors import is_dtensor


class OptimizerMatching(Matching):
    """The part of a comparison that is about optimizers."""

    def _object(self, live: Any, node: Any, path: str) -> Any:
        raise NotImplementedError

    def _optimizer(self, live: torch.optim.Optimizer, node: Any, path: str) -> Any:
        whole = nodes.members(node) or {}
        states = nodes.members(whole.get("state"))
        found = groups.saved_groups(whole.get("param_groups"))
        if states is None or found is None:
            self.problem(path, "the state of an optimizer", "a value of another kind")
            return live
        saved = [self._named(group) for group in found]
        if not groups.is_by_name(saved):
            return self._object(live, node, path)
        owners = groups.owners_of(saved)
        states = {self._selection.renamed(name): each for name, each in states.items()}
        options = self._options(live, saved, owners, path)
        content: dict[Any, Any] = {}
        for index, name, parameter in optimizers.parameters(live, self._names):
            where = f"{path}.state.{name}"
            if not self._selection.reaches(where):
                self.restoration.kept.append(where)
            elif name not in owners:
                self.missing(where, "a parameter of the step's optimizer", "nothing")
            elif not self._differs(states.get(name), where):
                known = nodes.members(states.get(name)) or {}
                merged = {**live.param_groups[index], **options[index]}
                content[parameter] = self._parameter_state(live, merged, parameter, known, where)
        ours = {name for _, name, _ in optimizers.parameters(live, self._names)}
        for name in missing_of(owners, ours):
            self.unexpected(f"{path}.state.{name}", "a parameter of the step's optimizer")
        others = optimizers.other_state(live)
        if not self._differs(whole.get("other"), f"{path}.other") and self._selection.takes(path):
            others = self.rebuild(others, whole.get("other", {}))
        self.restoration.containers.append(lambda: _set_optimizer_state(live, content, others))
        return live

    def _named(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """A saved group with its parameters' live names."""
        names = group.get(optimizers.PARAMS, [])
        if not self._selection.rename or not groups.is_by_name([group]):
            return group
        return {**group, optimizers.PARAMS: [self._selection.renamed(name) for name in names]}

    def _options(
        self,
        live: torch.optim.Optimizer,
        saved: list[Mapping[str, Any]],
        owners: groups.Owners,
        path: str,
    ) -> list[Mapping[str, Any]]:
        """The saved options for each live group, which they will replace."""
        names: list[list[str]] = [[] for _ in live.param_groups]
        for index, name, _ in optimizers.parameters(live, self._names):
            names[index].append(name)
        found: list[Mapping[str, Any]] = []
        for index, group in enumerate(live.param_groups):
            where = f"{path}.param_groups.{index}"
            options = groups.options_for(names[index], index, owners, saved)
            if options is None:
                differing = ", ".join(groups.differing_options(names[index], owners))
                got = f"parameters of several groups, which differ in {differing}"
                self.problem(where, "the options of one group of the step", got)
            found.append(options or {})
            self._group(group, options or {}, where)
        return found

    def _group(self, live: dict[str, Any], saved: Mapping[str, Any], path: str) -> None:
        """The saved options replace the live ones; those the step lacks stay."""
        options = {}
        for key, node in saved.items():
            where = f"{path}.{key}"
            if key == optimizers.PARAMS or not self._takes(where) or self._differs(node, where):
                continue
            options[key] = self.rebuild(live.get(key, ABSENT), node)
        self.restoration.containers.append(lambda: live.update(options))

    def _parameter_state(
        self,
        live: torch.optim.Optimizer,
        options: Mapping[str, Any],
        parameter: torch.Tensor,
        saved: Mapping[str, Any],
        path: str,
    ) -> dict[str, Any]:
        current = live.state.get(parameter, {})
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
            return self.rebuild(live, node, device)
        if isinstance(live, torch.Tensor) and not (key == "step" and live.device != device):
            place = None if is_dtensor(live) else placements.beside(live, parameter, beside)
            if self._memory.usable(live, name, place):
                return live
        is_sharded = is_dtensor(parameter) and self._memory.has_shape_of(parameter, name)
        return self._memory.make(name, device, parameter if is_sharded else None)


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
