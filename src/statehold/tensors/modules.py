"""Names that do not depend on how a module is wrapped, and which parameter has which name.

DistributedDataParallel and DataParallel put "module." and torch.compile "_orig_mod." into names;
both are left out here, so a step saved with the wrapper is found without it. Wrappers for
activation checkpointing take their own out, in a hook of state_dict(), and so does fully_shard:
its hook reshards, so the entries are sharded parameters even between a forward and its backward.
FSDP1 is refused: its state_dict() gathers with collectives.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from statehold.errors import UnsupportedValueError
from statehold.tensors import adapters

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_COMPILED = "_orig_mod"
_OF_TORCH = ("torch.nn.modules.", "torch.distributed.")


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
    state = module.state_dict(keep_vars=True)  # says which version of each module it is of
    for name in adapters.repeated(state):
        del state[name]
    state.update({name: values[own] for name in state if (own := _canonical(name)) in values})
    module.load_state_dict(state)


def owners(module: nn.Module) -> dict[str, nn.Module]:
    """The modules in a module, by their canonical names."""
    return {_canonical(name): each for name, each in unwrapped(module).named_modules()}


def has_own_way(module: nn.Module, name: str) -> bool:
    """Whether load_state_dict() of a module may take something else for its entry `name`.

    An overridden method does, or a hook: of the module itself, or of one on the way to the entry.
    """
    found, parts = owners(module), name.split(".")
    inside = (found.get(".".join(parts[:count])) for count in range(len(parts)))
    return any(any(map(_is_foreign, _ways(each))) for each in inside if each is not None)


def acts_when_loaded(module: nn.Module) -> bool:
    """Whether any module in a module does more in load_state_dict() than torch's own modules do."""
    return any(
        any(map(_is_foreign, (*_ways(each), *each._load_state_dict_post_hooks.values())))
        for each in unwrapped(module).modules()
    )


def _ways(module: nn.Module) -> Iterator[Any]:
    """The code that decides which entries a module takes."""
    yield type(module).load_state_dict
    yield type(module)._load_from_state_dict
    yield from module._load_state_dict_pre_hooks.values()


def _is_foreign(way: Any) -> bool:
    """Whether code for loading is neither of a module of torch nor of fully_shard."""
    return not str(getattr(way, "__module__", "")).startswith(_OF_TORCH)


def takes(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> bool:
    """Whether a module is known to give its own tensors the shapes of `saved` (of the meta device)
    when it is loaded, or to take one element as a 0-dim tensor, as torch's own code does.

    Asks a stand-in, whose tensors are on the meta device and which has no modules in it. What hooks
    would do is not tried: they reach the module itself.
    """
    kind = type(module)
    if module._load_state_dict_pre_hooks or kind.load_state_dict is not nn.Module.load_state_dict:
        return False
    errors, metadata = list[str](), {"version": module._version}
    try:
        stand_in = kind.__new__(kind)
        stand_in.__dict__.update({key: _apart(each) for key, each in vars(module).items()})
        stand_in._modules = {}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stand_in._load_from_state_dict(dict(saved), "", metadata, True, [], [], errors)
    except Exception:  # it needs more than shapes, so nothing is known
        return False
    got = {**stand_in._parameters, **stand_in._buffers}
    return not errors and all(
        (own := got.get(name)) is not None
        and (own.shape == each.shape or (own.shape, each.shape) == ((), (1,)))
        for name, each in saved.items()
    )


def _apart(value: Any) -> Any:
    """An attribute of a stand-in: what a change of it would reach is another object."""
    if isinstance(value, torch.Tensor):
        made = torch.empty_like(value, device="meta")
        is_parameter = isinstance(value, nn.Parameter)
        return nn.Parameter(made, value.requires_grad) if is_parameter else made
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _apart(each)) for key, each in value.items())
    return list(value) if type(value) is list else value


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


def frozen(path: str, names: Iterable[str], held: Iterable[Any]) -> list[str]:
    """The full names of those entries that are parameters without a need for gradients."""
    return [
        f"{path}.{name}"
        for name, each in zip(names, held, strict=True)
        if isinstance(each, nn.Parameter) and not each.requires_grad
    ]


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
