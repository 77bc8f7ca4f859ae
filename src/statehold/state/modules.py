"""Names that do not depend on how a module is wrapped, and which parameter has which name.

DistributedDataParallel and DataParallel put "module." and torch.compile "_orig_mod." into names;
both are left out here, so a step saved with the wrapper is found without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_COMPILED = "_orig_mod"


def unwrapped(module: nn.Module) -> nn.Module:
    """The module below data-parallel wrappers and torch.compile, in whatever order they are."""
    while True:
        if isinstance(module, _WRAPPERS):
            module = module.module
        elif _COMPILED in module._modules:
            module = module.get_submodule(_COMPILED)
        else:
            return module


def entries(module: nn.Module) -> dict[str, Any]:
    """The module's own state by canonical name: live parameters, live buffers, extra state."""
    state: Mapping[str, Any] = unwrapped(module).state_dict(keep_vars=True)
    return {_canonical(name): value for name, value in state.items()}


def own_tensors(module: nn.Module) -> set[int]:
    """The ids of what can be filled in place. Other entries were made by state_dict() hooks or
    get_extra_state(): writing into them would reach nobody."""
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def hand_over(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Load the entries that could not be filled in place; those that were are loaded from
    themselves, which copies nothing."""
    module = unwrapped(module)
    state = module.state_dict(keep_vars=True)
    state.update({name: values[own] for name in state if (own := _canonical(name)) in values})
    module.load_state_dict(state)


def _canonical(name: str) -> str:
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def parameter_names(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """The full name of every parameter of the modules (path, module), by the object's id."""
    names: dict[int, str] = {}
    for path, module in modules:
        for name, value in entries(module).items():
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), f"{path}.{name}")
    return names
