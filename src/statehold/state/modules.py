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
_COMPILED = "_orig_mod."


def unwrapped(module: nn.Module) -> nn.Module:
    """The module below data-parallel wrappers."""
    while isinstance(module, _WRAPPERS):
        module = module.module
    return module


def entries(module: nn.Module) -> dict[str, Any]:
    """The module's own state by canonical name: live parameters, live buffers, extra state."""
    state: Mapping[str, Any] = unwrapped(module).state_dict(keep_vars=True)
    return {name.replace(_COMPILED, ""): value for name, value in state.items()}


def set_extra_state(module: nn.Module, name: str, value: Any) -> None:
    """Hand the value of the entry `name`, which ends in "_extra_state", to its submodule."""
    module = unwrapped(module)
    for full_name, child in module.named_modules(remove_duplicate=False):
        prefix = f"{full_name}." if full_name else ""
        if f"{prefix}_extra_state".replace(_COMPILED, "") == name:
            child.set_extra_state(value)
            return


def parameter_names(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """The full name of every parameter of the modules (path, module), by the object's id."""
    names: dict[int, str] = {}
    for path, module in modules:
        for name, value in entries(module).items():
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), f"{path}.{name}")
    return names
