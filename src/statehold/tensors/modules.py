"""Names that do not depend on how a module is wrapped, and which parameter has which name.

DistributedDataParallel and DataParallel put "module." and torch.compile "_orig_mod." into names;
both are left out here, so a step saved with the wrapper is found without it. Wrappers for
activation checkpointing take their own out, in a hook of state_dict(), and so does fully_shard:
its hook reshards, so the entries are sharded parameters even between a forward and its backward.
FSDP1 is refused: its state_dict() gathers with collectives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from statehold.errors import UnsupportedValueError
from statehold.tensors import adapters

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


def replicas(module: nn.Module) -> tuple[Any, list[torch.Tensor]] | None:
    """What DistributedDataParallel keeps equal over a process group, and the group; None without.

    These are the parameters, and the buffers unless `broadcast_buffers=False` leaves each rank its
    own.
    """
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        if isinstance(module, nn.DataParallel):
            module = module.module
        elif _COMPILED in module._modules:
            module = module.get_submodule(_COMPILED)
        else:
            return None
    named = [*module.module.named_parameters()]
    if module.broadcast_buffers:
        named += module.module.named_buffers()
    ignored = module.parameters_to_ignore
    return module.process_group, [tensor for name, tensor in named if name not in ignored]


def entries(module: nn.Module) -> dict[str, Any]:
    """The module's own state by canonical name: live parameters, live buffers, extra state."""
    state = _state_of(unwrapped(module))
    if not any(_COMPILED in name for name in state):
        return state
    return {_canonical(name): value for name, value in state.items()}


def _state_of(module: nn.Module) -> dict[str, Any]:
    """The live state_dict(), without entries that repeat what a tensor in it is made of."""
    state = dict(module.state_dict(keep_vars=True))
    for name in adapters.repeated(state):
        del state[name]
    return state


def own_tensors(module: nn.Module) -> set[int]:
    """The ids of what can be filled in place. Other entries were made by state_dict() hooks or
    get_extra_state(): writing into them would reach nobody."""
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def hand_over(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Load the entries that could not be filled in place; those that were are loaded from
    themselves, which copies nothing."""
    module = unwrapped(module)
    state = _state_of(module)
    state.update({name: values[own] for name in state if (own := _canonical(name)) in values})
    module.load_state_dict(state)


def _canonical(name: str) -> str:
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def entries_to_save(module: nn.Module, path: str) -> dict[str, Any]:
    """entries() of a module at `path`. Raises UnsupportedValueError for what no step can hold."""
    _refuse_flat(module, path)
    adapters.refuse_packed(module, path)
    found = entries(module)
    adapters.refuse_stateless(module, path)
    return found


def parameter_names(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """The full name of every parameter of the modules (path, module), by the object's id."""
    names: dict[int, str] = {}
    for path, module in modules:
        names = names_in(entries_to_save(module, path), path) | names
    return names


def names_in(found: dict[str, Any], path: str) -> dict[int, str]:
    """The full name of each of the entries of the module at `path`, by the object's id; the first
    name of what has several."""
    return {id(value): f"{path}.{name}" for name, value in reversed(found.items())}


def _classes_in(module: nn.Module) -> set[type]:
    """The classes of a module and of all that it holds; named_modules() takes ten times as long."""
    found, left = set[type](), [module]
    while left:
        each = left.pop()
        found.add(type(each))
        left += [child for child in each._modules.values() if child is not None]
    return found


def _refuse_flat(module: nn.Module, path: str) -> None:
    """Raise for FullyShardedDataParallel, whose parameters are pieces of flattened ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is None or not any(
        issubclass(kind, fsdp.FullyShardedDataParallel) for kind in _classes_in(module)
    ):
        return
    for name, each in module.named_modules():
        if isinstance(each, fsdp.FullyShardedDataParallel):
            raise UnsupportedValueError(
                "a module that is wrapped in FullyShardedDataParallel (FSDP1) cannot be stored",
                facts={"path": f"{path}.{name}" if name else path},
                hint="shard with torch.distributed.fsdp.fully_shard (FSDP2)",
            )
