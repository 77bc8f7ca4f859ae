"""Modules: each entry of a module is a tensor of its own in a step, by a name that does not depend
on how the module is wrapped.

DistributedDataParallel and DataParallel put "module." and torch.compile "_orig_mod." into names;
both are left out here, so a step saved with the wrapper is found without it. Wrappers for
activation checkpointing take their own out, in a hook of state_dict(), and so does fully_shard:
its hook reshards, so the entries are sharded parameters even between a forward and its backward.
FSDP1 is refused: its state_dict() gathers with collectives.

Owns: which parameter has which name; which tensors DistributedDataParallel keeps equal; which
entries are filled in place, and which a module has to load itself.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, compress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import Layout
from statehold.process.worker import apart
from statehold.tensors import composed
from statehold.tensors.captured import Capturing, in_batches
from statehold.tensors.columns import BATCH
from statehold.tensors.found import Eager, NewTensors
from statehold.tensors.kinds.objects import load as load_object
from statehold.tensors.matching import ABSENT, Matching, Walk, described, missing_of
from statehold.tensors.nodes import members, payload
from statehold.tensors.placements import of_group
from statehold.tensors.storable import ORDINARY

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_COMPILED = "_orig_mod"
_RESIZED = (torch.Tensor, nn.Parameter, nn.Buffer)
_OF_TORCH = ("torch.nn.modules.", "torch.distributed.")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module below data-parallel wrappers and torch.compile, in whatever order they are."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def _wrapped(module: nn.Module) -> nn.Module | None:
    name = "module" if isinstance(module, _WRAPPERS) else _COMPILED
    return dict(module.named_children()).get(name)


def of(value: Any) -> nn.Module | None:
    return value if isinstance(value, nn.Module) else None


def replicas_in(parts: Iterable[tuple[str, Any]]) -> dict[int, Layout]:
    """The layouts of the tensors that DistributedDataParallel replicates, by their ids."""
    layouts: dict[int, Layout] = {}
    for _, part in parts:
        found = _replicas(part) if isinstance(part, nn.Module) else None
        if found is not None and (layout := of_group(found[0])) is not None:
            layouts |= dict.fromkeys(map(id, found[1]), layout)
    return layouts


def _replicas(module: nn.Module) -> tuple[Any, list[torch.Tensor]] | None:
    """What DistributedDataParallel keeps equal over a process group, and the group; None without.

    These are the parameters, and the buffers unless `broadcast_buffers=False` leaves each rank its
    own.
    """
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        if (inner := _wrapped(module)) is None:
            return None
        module = inner
    named = [*module.module.named_parameters()]
    if module.broadcast_buffers:
        named += module.module.named_buffers()
    ignored = module.parameters_to_ignore
    return module.process_group, [tensor for name, tensor in named if name not in ignored]


# -- into a step -----------------------------------------------------------------------------------


def capture(to: Capturing, module: nn.Module, path: str) -> Any:
    def other(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return to.tensor(value, where, lazy=isinstance(value, nn.Parameter))
        return to.values.encode(value, where)

    with to.values.within(module, path):
        to.values.check_depth(module, path)  # for its tensors
        entries_now = to.entries.get(id(module)) or entries(module)
        place_of = partial(to.place, path=path) if to.replicas else None
        eager = to.eager(Eager.BUT_PARAMETERS)
        nodes: list[dict[Any, Any]] = []
        for begin, names, held in in_batches(entries_now, BATCH):
            are_parameters = [isinstance(each, nn.Parameter) for each in held]
            parameters = compress(zip(names, held, strict=True), are_parameters)
            to.frozen += [f"{path}.{name}" for name, each in parameters if not each.requires_grad]
            observed = eager, to.rank, names, are_parameters, to.layouts_of(held)
            new = partial(_new, path, names, are_parameters, eager) if place_of is None else None
            members = zip(names, held, strict=True)
            one_by_one = partial(to.found.nodes, members, path, eager, place_of, other)
            nodes.append(to.found.batch((path, begin), observed, held, one_by_one, new)[0])
        return to.seen.mapping(path, nodes, lambda: chain.from_iterable(map(dict.items, nodes)))


def _new(path: str, names: list[str], are_parameters: list[bool], eager: Eager) -> NewTensors:
    """What there is to know of tensors that are new (found.New)."""
    found = {name: f"{path}.{name}" for name in names}
    is_eager = [eager is Eager.ALL or not each for each in are_parameters]
    nodes = {name: {"$tensor": found[name]} for name in names}
    return list(found.values()), is_eager, [False] * len(names), nodes


def entries(module: nn.Module) -> dict[str, Any]:
    """The module's own state by canonical name: live parameters, live buffers, extra state."""
    state = dict(_state_of(unwrapped(module)))
    if not ORDINARY.issuperset(map(type, state.values())):
        for name in composed.repeated(state):  # these say again what a tensor is made of
            del state[name]
    if _COMPILED not in "\n".join(state):
        return state
    return {_canonical(name): value for name, value in state.items()}


def _state_of(module: nn.Module) -> dict[str, Any]:
    """With the live parameters, unless its own state_dict() cannot be asked for them."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:
        if type(module).state_dict is nn.Module.state_dict:
            raise
        return module.state_dict()


# -- out of a step ---------------------------------------------------------------------------------


def names(_: Walk, live: nn.Module, node: Any, path: str) -> Iterator[str]:
    found = dict.fromkeys((*entries(live), *(members(node) or ())))
    yield from (f"{path}.{name}" for name in found) if found else (path,)


def match(to: Matching, live: nn.Module, node: Any, path: str) -> None:
    saved = members(node)
    if saved is None:
        to.problem(path, "the state of a module", "a value of another kind")
        return
    here, own, before = entries(live), own_tensors(live), len(to.problems)
    for name in missing_of(saved, here):
        to.unexpected(f"{path}.{name}", to.described(saved[name]))
    handed: dict[str, Any] = {}
    for name, value in here.items():
        where = f"{path}.{name}"
        takes = to.selection.takes(where)
        node = saved[name] if name in saved else to.of_another_name(value)
        if node is ABSENT:
            if takes:
                to.missing(where, described(value))
            else:
                to.restoration.kept.append(where)
            continue
        if isinstance(value, nn.Parameter) and takes and name in saved:
            to.restoration.parameters[where] = value.requires_grad
        if takes and name in saved and _resizes(to, live, name, value, saved):
            to.restoration.loaded.append(where)
            handed[name] = to.rebuild(ABSENT, node)
        elif id(value) in own:
            to.tensor(value, node, where)
        elif to.takes(where) and not to.differs(node, where):
            handed[name] = to.rebuild(ABSENT, node)
    takes_any = any(to.selection.takes(f"{path}.{name}") for name in here)
    if handed or (takes_any and acts_when_loaded(live)):
        to.restoration.objects.append(partial(load_object, load, live, handed, path))
    differing = (name.removeprefix(f"{path}.") for name, _ in to.problems[before:])
    if any(_has_own_way(live, name) for name in differing):
        to.restoration.by_hand.append(path)


def _resizes(
    to: Matching, live: nn.Module, name: str, value: Any, saved: Mapping[Any, Any]
) -> bool:
    """Whether a module gives an entry of its own the saved shape when it is loaded."""
    key = payload(saved[name], "$tensor")
    if key is None or type(value) not in _RESIZED or is_lazy(value):
        return False
    if to.memory.shape_of(key) == value.shape or to.memory.dtype_of(key) != value.dtype:
        return False
    inside = name.rpartition(".")[0]
    owner = _owners(live).get(inside, live)
    found = {own: f"{inside}.{own}".lstrip(".") for own in _own(owner)}
    shapes = {own: to.outlined(saved[full]) for own, full in found.items() if full in saved}
    return _takes(owner, shapes)


def own_tensors(module: nn.Module) -> set[int]:
    """The ids of what can be filled in place. Other entries were made by state_dict() hooks or
    get_extra_state(): writing into them would reach nobody."""
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def load(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Load the entries that could not be filled in place; those that were are loaded from
    themselves, which copies nothing."""
    module = unwrapped(module)
    state = _state_of(module)  # says which version of each module it is of
    for name in composed.repeated(state):
        del state[name]
    state.update({name: values[own] for name in state if (own := _canonical(name)) in values})
    module.load_state_dict(state)


def _owners(module: nn.Module) -> dict[str, nn.Module]:
    """The modules in a module, by their canonical names."""
    return {_canonical(name): each for name, each in unwrapped(module).named_modules()}


def _has_own_way(module: nn.Module, name: str) -> bool:
    """Whether load_state_dict() of a module may take something else for its entry `name`.

    An overridden method does, or a hook: of the module itself, or of one on the way to the entry.
    """
    found, parts = _owners(module), name.split(".")
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


def _takes(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> bool:
    """Whether a module is known to give its own tensors the shapes of `saved` (of the meta device)
    when it is loaded, or to take one element as a 0-dim tensor, as torch's own code does.

    Asks a stand-in, whose tensors are on the meta device and which has no modules in it. What hooks
    would do is not tried: they reach the module itself.
    """
    kind, (whole, own_part, *hooks) = type(module), _ways(module)
    if hooks or whole is not nn.Module.load_state_dict:
        return False
    errors = list[str]()
    try:
        stand_in = kind.__new__(kind)
        stand_in.__dict__.update({key: _apart(each) for key, each in vars(module).items()})
        into = partial(own_part, stand_in)
        apart(_load, into, dict(saved), {"version": module._version}, errors)
        got = _own(stand_in)
    except Exception:  # it needs more than shapes, so nothing is known
        return False
    return not errors and all(
        (own := got.get(name)) is not None
        and (own.shape == each.shape or (own.shape, each.shape) == ((), (1,)))
        for name, each in saved.items()
    )


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module, without those of the modules in it."""
    kinds = module.named_parameters, module.named_buffers
    return dict(chain.from_iterable(each(recurse=False, remove_duplicate=False) for each in kinds))


def _load(into: Any, saved: dict[str, torch.Tensor], about: Any, errors: Any) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        into(saved, "", about, True, [], [], errors)


def _apart(value: Any) -> Any:
    """An attribute of a stand-in: what a change of it would reach is another object. A module in a
    dict is left out."""
    if isinstance(value, torch.Tensor):
        made = torch.empty_like(value, device="meta")
        is_parameter = isinstance(value, nn.Parameter)
        return nn.Parameter(made, value.requires_grad) if is_parameter else made
    if type(value) in (dict, OrderedDict):
        return type(value)((k, _apart(v)) for k, v in value.items() if not isinstance(v, nn.Module))
    return list(value) if type(value) is list else value


def _canonical(name: str) -> str:
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def look_into(parts: Iterable[tuple[str, Any]]) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The entries of each module among the parts (path, part) of a state, by the module's id, and
    the full name of every entry, by the object's id.

    Each module is asked once: a hook of state_dict() may make some entries anew each time. Raises
    UnsupportedValueError for what no step can hold.
    """
    found: dict[int, dict[str, Any]] = {}
    names: dict[int, str] = {}
    for path, part in parts:
        if isinstance(part, nn.Module) and id(part) not in found:
            _refuse_flat(part, path)
            has_quantized = composed.BITSANDBYTES in sys.modules
            if has_quantized:
                composed.refuse_packed(part, path)
            found[id(part)] = entries(part)
            if has_quantized:
                composed.refuse_stateless(part, path)
            names = names_in(found[id(part)], path) | names
    return found, names


def names_in(found: dict[str, Any], path: str) -> dict[int, str]:
    """The full name of each of the entries of the module at `path`, by the object's id; the first
    name of what has several."""
    return {id(value): f"{path}.{name}" for name, value in reversed(found.items())}


def _refuse_flat(module: nn.Module, path: str) -> None:
    """Raise for FullyShardedDataParallel, whose parameters are pieces of flattened ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    kinds, left = set[type](), [] if fsdp is None else [module]
    while left:  # level by level; named_modules() takes ten times as long
        kinds.update(map(type, left))
        inside = chain.from_iterable([each.__dict__["_modules"].values() for each in left])
        left = [each for each in inside if each is not None]
    if fsdp is None or not any(issubclass(kind, fsdp.FullyShardedDataParallel) for kind in kinds):
        return
    for name, each in module.named_modules():
        if isinstance(each, fsdp.FullyShardedDataParallel):
            raise UnsupportedValueError(
                "a module that is wrapped in FullyShardedDataParallel (FSDP1) cannot be stored",
                facts={"path": f"{path}.{name}" if name else path},
                hint="shard with torch.distributed.fsdp.fully_shard (FSDP2)",
            )
