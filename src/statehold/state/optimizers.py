"""How torch optimizers keep their state: by parameter, in groups, under running indices.

An optimizer is saved by the names of its parameters, so that neither the order of groups in
memory nor the index that Optimizer.state_dict() would give matters to a restore:
    {"state": {parameter name: {key: value}}, "param_groups": [{option: value, "params": [name]}],
     "other": {key: value}}
"other" is what the optimizer keeps in its state under keys that are no parameters, if anything.
A parameter that no module in the state holds is named by its running index, as torch does.
An optimizer whose class or hooks change what state_dict() means is saved through that instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

PARAMS = "params"
_HOOKS = tuple(
    f"_optimizer_{action}_{when}_hooks"
    for action in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def before_every_step(action: Callable[[], None]) -> Any:
    """Call `action` before each step() of every torch optimizer; returns what remove()s it."""
    return register_optimizer_step_pre_hook(lambda *_: action())


def is_standard(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state lies where torch.optim.Optimizer keeps it."""
    kind = type(optimizer)
    return (
        kind.state_dict is torch.optim.Optimizer.state_dict
        and kind.load_state_dict is torch.optim.Optimizer.load_state_dict
        and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    )


def parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(group index, name, parameter) of every parameter, in the order of the groups."""
    running = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group[PARAMS]:
            yield index, names.get(id(parameter), str(running)), parameter
            running += 1


def owned_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that only step() changes: the parameters and the state at its top level."""
    for group in optimizer.param_groups:
        yield from group[PARAMS]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def other_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The entries of the state whose keys are no parameters, such as a common step."""
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
    return parameter.device
