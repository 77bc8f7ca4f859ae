"""Flatten a state into tensors with names and a tree of plain values; no tensor's bytes move here.

Owns: which tensors a step holds, what they are called, and which must be copied at once (eager)
and which may be copied until the next update (lazy):
    lazy    parameters of modules; parameters and state tensors of optimizers in the state, and
            tensors that share their storage; state tensors of optimizers that step through the
            gate, wherever they are found; pieces; what is wrapped in Gated
    eager   everything else: buffers, other tensors, tensors inside state_dict() of objects, tensors
            in param_groups; and whatever is wrapped in Volatile, which wins
Random generators are read last of all: other objects may draw while they give their state, as a
loader does that was not iterated yet.
Invariants: the memory of a captured tensor stays alive at the address that it had at capture
(columns). The tree shares no container with the live state. In a
job of several ranks a tensor is this rank's box, and its spec says of what: DTensors by their
placements, what DistributedDataParallel replicates, and the optimizer state of both. All else is
this rank's own.

Containers of tensors as flat batches.

Owns: flattening many small dicts, such as those that an optimizer keeps for its parameters, without
Python for each tensor; and putting plain values of now into the nodes of such dicts.

Not here: the copying (engine, devices), the layout of the file (plan), layouts (placements), what
is copied at once in here (captured), ties and what is recognised from the capture before (found).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

from statehold.encoding import values
from statehold.errors import UsageError, noting
from statehold.layout.plan import TensorSpec
from statehold.tensors import (
    adapters,
    foreign,
    loaders,
    modules,
    optimizers,
    placements,
    scalers,
    subclasses,
)
from statehold.tensors.captured import (
    Capture,
    Nameless,
    clone_what_waits_for_no_device,
    lost_of,
    note_of,
)
from statehold.tensors.columns import BATCH, Tensors
from statehold.tensors.composed import COMPLEX, SUBCLASS, as_real
from statehold.tensors.facts import layout_of, storage_addresses
from statehold.tensors.found import Found, Kind, Seen
from statehold.tensors.marks import Gated, Mark, Volatile
from statehold.tensors.parts import is_stateful, parts
from statehold.tensors.pieces import Piece
from statehold.tensors.placements import OWN, Placed
from statehold.tensors.rng import Rng
from statehold.tensors.stepping import MARKED, Owners, Storages, storages
from statehold.tensors.storable import (
    ORDINARY,
    check_storable,
    is_dtensor,
    is_storable,
    local_of,
    storage_of,
)
from statehold.tensors.stored import (
    InFiles,
    StoredObject,
    StoredOptimizer,
    StoredState,
    saved_parameters,
)

# -- containers as batches -------------------------------------------------------------------------


# The states of so many parameters are one batch.
STATES = 64
_PLAIN = {bool, int, float, str, type(None)}


@dataclass(frozen=True, slots=True)
class Flat:
    """Dicts of tensors and plain values. keys: of each dict. tensors: of all, in their order.
    others: (which dict, key, value) of the plain values."""

    keys: list[tuple[Any, ...]]
    tensors: list[torch.Tensor]
    others: list[tuple[int, str, Any]]

    @classmethod
    def of(cls, dicts: Sequence[Any]) -> Flat | None:
        """None where something else is among them, or no tensor."""
        if set(map(type, dicts)) != {dict}:
            return None
        keys = list(map(tuple, dicts))
        members = list(chain.from_iterable(map(dict.values, dicts)))
        if are_tensors(members):
            return cls(keys, members, [])
        others = [
            (index, key, value)
            for index, each in enumerate(dicts)
            for key, value in each.items()
            if type(value) in _PLAIN and all(map(values.is_plain_key, each))
        ]
        tensors = [value for value in members if isinstance(value, torch.Tensor)]
        if not tensors or len(tensors) + len(others) < len(members):
            return None
        return cls(keys, tensors, others)

    @property
    def shape(self) -> Any:
        """All there is to know besides the tensors and the plain values."""
        kinds = None
        if set(map(type, chain.from_iterable(self.keys))) != {str}:
            kinds = list(map(type, chain.from_iterable(self.keys)))  # True and 1 are equal keys
        return self.keys, kinds, [(index, key) for index, key, _ in self.others]

    def with_others(self, nodes: list[Any], paths: Sequence[str]) -> list[Any]:
        """The nodes of these dicts, by those of dicts with other plain values."""
        nodes = list(nodes)
        for index, key, value in self.others:
            node = values.encode(value, values.join(paths[index], key))
            nodes[index] = {**nodes[index], key: node}
        return nodes


def are_tensors(members: Sequence[Any]) -> bool:
    """Whether there are any, and all are tensors."""
    kinds = set(map(type, members))
    return bool(kinds) and all(issubclass(kind, torch.Tensor) for kind in kinds)


def in_batches(members: Mapping[Any, Any], size: int) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """(how many came before, the next keys, their values) of the members of a container."""
    keys, held = list(members), list(members.values())
    for begin in range(0, len(keys), size):
        yield begin, keys[begin : begin + size], held[begin : begin + size]


# -- the capture -----------------------------------------------------------------------------------


# Of nodes: of an optimizer, its state or groups, a parameter or a group.
OPTIMIZER_LEVELS = 3


def capture(
    state: Mapping[str, Any],
    rank: int | None = None,
    stepping: Iterable[torch.optim.Optimizer] = (),
    seen: Seen | None = None,
    *,
    world: int = 1,
    own: bool = True,
) -> Capture:
    """Capture a state, or `rank`'s part of one that `world` ranks save (None: it is alone).

    stepping: optimizers whose every step() waits at the gate, whether the state has them or not.
    seen: what the capture before saw; it makes this one faster, and changes nothing else.
    own: with random generators and data loaders, which replicas do not have in common.
    Raises UnsupportedValueError, with the path, for what no step can hold.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            "the state must be a mapping of names to values",
            facts={"expected": "a dict", "got": type(state).__name__},
            hint='give the parts names: save(step, {"model": model, "optimizer": optimizer})',
        )
    found = _Capturer(state, rank, world, stepping, Seen() if seen is None else seen, own)
    try:
        tree = found.encoded(dict(state), "")
        found.read_generators()
        found.doubts += lost_of(found.nameless, found.tensors) if found.has_modules else ()
        found.clone_small()
    except BaseException:
        for stored in found.stored:
            stored.release()
        raise
    finally:
        found.let_go()
    note = note_of(found.parameters)
    frozen = tuple(found.frozen) if found.has_modules else None
    return Capture(found.tensors, tree, note, found.doubts, found.numbers, found.stored, frozen)


class _Capturer:
    """One capture: what was found so far."""

    def __init__(
        self,
        state: Mapping[str, Any],
        rank: int | None,
        world: int,
        stepping: Iterable[torch.optim.Optimizer],
        seen: Seen,
        own: bool,
    ) -> None:
        found = list(parts(state))
        self._own = own
        self._rank, self._world = rank, world
        self.optimizers = [part for _, part in found if isinstance(part, torch.optim.Optimizer)]
        # Of each module, asked once: a hook of state_dict() may make some anew each time.
        self._entries, self._names = dict[int, dict[str, Any]](), dict[int, str]()
        for path, part in found:
            if isinstance(part, nn.Module) and id(part) not in self._entries:
                entries = self._entries[id(part)] = modules.entries_to_save(part, path)
                self._names = modules.names_in(entries, path) | self._names
        self._seen, self._found = seen, Found(seen)
        self._replicas = placements.replicas_in(
            (part for _, part in found if isinstance(part, nn.Module)), self._rank
        )
        self._stepping = stepping
        self.parameters: list[TensorSpec] = []  # plain tensors that are those of an optimizer
        self._mark: type[Mark[Any]] | None = None
        self._values = values.Encoder(self.leaf, self._members_of)
        self._generators: list[tuple[Rng, str, dict[str, Any], int]] = []
        self.numbers: list[scalers.Number] = []
        self.doubts: list[str] = []
        self.has_modules, self.frozen = bool(self._entries), list[str]()
        self.nameless: list[Nameless] = []
        self.stored: list[StoredState] = []
        # Of parameters whose state may be in the files of another rank: what this rank has in
        # memory of it is then written whole, by the first replica, as files are.
        self._whole: set[int] = set()

    @property
    def tensors(self) -> Tensors:
        return self._found.tensors

    def encoded(self, value: Any, path: str) -> Any:
        return self._values.encode(value, path)

    def let_go(self) -> None:
        """The encoder refers to this capture: in a cycle, tensors would wait for a collection."""
        self._values.leaf = self._values.members = None

    # -- the hook of the encoder -----------------------------------------------------------

    def leaf(self, value: Any, path: str) -> Any | None:
        """The node of what is not a plain value; None for what nobody can store."""
        if isinstance(value, torch.Tensor):
            return self._plain_tensor(value, path)
        if isinstance(value, Mark):
            return self._marked(value, path)
        if isinstance(value, Piece):
            return self._tensor(value.tensor, path, lazy=True, place=value.at(path, self._rank))
        if isinstance(value, nn.Module):
            return self._values.within(self._module, value, path)
        if isinstance(value, InFiles):
            return {"$tensor": value.name}
        if isinstance(value, StoredObject):
            return self._inside(value, lambda: self._stored(value), path)
        optimizer = optimizers.behind(value)
        if optimizer is not None and optimizers.is_known_by_name(optimizer):
            return self._values.within(self._optimizer, optimizer, path, OPTIMIZER_LEVELS)
        if not self._own and (isinstance(value, Rng) or loaders.found_in(value)):
            return {}
        if isinstance(value, Rng):
            return self._later(value, path)
        if scalers.waits_for_device(value):
            return self._scaler(value, path)
        if (refusal := loaders.refusal(value, path)) is not None:
            raise refusal
        if is_stateful(value):
            return self._inside(value, lambda: loaders.state_of(value, self._tell(path)), path)
        return self._foreign(value, path)

    def _stored(self, value: StoredObject) -> Any:
        self.stored.append(value.stored_state())
        return self.stored[-1].tree

    def _tell(self, path: str) -> Callable[[str], None]:
        return lambda doubt: self.doubts.append(
            f'a restart may continue differently in "{path}": {doubt}'
        )

    def _later(self, rng: Rng, path: str) -> dict[str, Any]:
        """A node that is empty until read_generators()."""
        node: dict[str, Any] = {}
        self._generators.append((rng, path, node, self._values.depth))
        return node

    def _scaler(self, scaler: Any, path: str) -> Any:
        self._values.check_depth(scaler, path, 2)  # an infinity that is filled in is a node
        node = self.encoded(scalers.known(scaler), path)
        self.numbers += scalers.numbers(scaler, node)
        return node

    def read_generators(self) -> None:
        for rng, path, node, depth in self._generators:
            self._values.depth = depth
            node.update(self.encoded(rng.state_dict(), path))

    def clone_small(self) -> None:
        """In a state with tensors on a device, copy now what is small or may change soon."""
        self._seen.structure = self.tensors.recognise(self._seen.structure)
        if any(self._seen.structure.external):
            clone_what_waits_for_no_device(self.tensors)

    def _inside(self, value: Any, content: Callable[[], Any], path: str) -> Any:
        def taken(to: values.Encoder, _: Any, path: str) -> Any:
            with noting(f'while the state of "{path}" was taken; nothing of the step is saved'):
                inside = content()
            return to.encode(inside, path)

        return self._values.within(taken, value, path, 0)

    def _marked(self, value: Mark[Any], path: str) -> Any:
        outer = self._mark
        if outer is not Volatile:
            self._mark = type(value)
        try:
            return self._inside(value, lambda: value.value, path)
        finally:
            self._mark = outer

    def _module(self, to: values.Encoder, module: nn.Module, path: str) -> Any:
        to.check_depth(module, path)  # for its tensors

        def other(value: Any, where: str) -> Any:
            if isinstance(value, torch.Tensor):
                return self._tensor(value, where, lazy=isinstance(value, nn.Parameter))
            return self.encoded(value, where)

        entries = self._entries.get(id(module)) or modules.entries(module)
        place_of = partial(self._place, path=path) if self._replicas else None
        kind = Kind.EAGER if self._mark is Volatile else Kind.OF_MODULE
        nodes: list[dict[Any, Any]] = []
        for begin, names, held in in_batches(entries, BATCH):
            key = path, begin
            are_parameters = [isinstance(each, nn.Parameter) for each in held]
            self.frozen += modules.frozen(path, names, held)
            observed = kind, self._rank, names, are_parameters, self._layouts_of(held)
            found = self._found.recognised(key, observed, held)
            if found is None:
                first, members = len(self.tensors), dict(zip(names, held, strict=True))
                found = self._found.nodes(members, path, kind, place_of, other)
                self._found.remember(key, observed, held, first, found)
            nodes.append(found)
        return self._seen.mapping(path, nodes, lambda: chain.from_iterable(map(dict.items, nodes)))

    def _layouts_of(self, tensors: Iterable[Any]) -> list[Any] | None:
        """The layouts of those that DistributedDataParallel replicates."""
        return list(map(self._replicas.get, map(id, tensors))) if self._replicas else None

    def _optimizer(self, to: values.Encoder, optimizer: torch.optim.Optimizer, path: str) -> Any:
        to.check_depth(optimizer, path)  # for the state and the options of a parameter
        names_of_groups, parameters = optimizers.names_of(optimizer, self._names)
        groups: list[Any] = [{optimizers.PARAMS: names} for names in names_of_groups]
        names = list(chain.from_iterable(names_of_groups))
        if not self._names.keys() >= set(map(id, parameters)):
            named = zip(names, parameters, strict=True)
            self.nameless += [(path, *each) for each in named if id(each[1]) not in self._names]
        where = f"{path}.state"
        held = self._stored_states(optimizer, names, parameters, where)
        held = optimizers.states_of(optimizer, parameters) if held is None else held
        state = self._parameter_states(held, names, parameters, where)
        for index, group in enumerate(optimizer.param_groups):
            options = {key: item for key, item in group.items() if key != optimizers.PARAMS}
            groups[index] |= self._members(options, f"{path}.param_groups.{index}")
        node = {
            "state": state,
            "param_groups": [values.mapping_of(group) for group in groups],
        }
        if others := optimizers.other_state(optimizer):
            node["other"] = self.encoded(others, f"{path}.other")
        return node

    def _members(self, members: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        return {key: self.encoded(item, f"{path}.{key}") for key, item in members.items()}

    def _stored_states(
        self,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        parameters: list[torch.Tensor],
        path: str,
    ) -> list[Any] | None:
        """What the optimizer keeps for each parameter, a part of it in files; None: all of it is
        in memory."""
        if not isinstance(optimizer, StoredOptimizer):
            return None
        paths = [f"{path}.{name}" for name in names]
        places = list(map(self._place, parameters, paths))
        saved = saved_parameters(paths, places, self._rank, self._world)
        self._whole |= set(compress(map(id, parameters), [each.is_shared for each in saved]))
        stored = optimizer.stored_parameters(saved)
        if stored is None:
            return None
        self.stored.append(stored)
        return list(stored.tree)

    def _parameter_states(
        self, held: list[Any], names: list[str], parameters: list[torch.Tensor], path: str
    ) -> Any:
        """The node of their states by the parameter's name, of each that has a state."""
        if type(None) in set(map(type, held)):  # not all have a state
            has_state = [state is not None for state in held]
            names, parameters, held = (
                list(compress(names, has_state)),
                list(compress(parameters, has_state)),
                list(compress(held, has_state)),
            )
        nodes = []
        for begin in range(0, len(names), STATES):
            chosen = slice(begin, begin + STATES)
            batch = names[chosen], held[chosen], parameters[chosen]
            nodes.append(self._states(*batch, (path, begin)))

        def items() -> Iterator[tuple[str, Any]]:
            return zip(names, chain.from_iterable(nodes), strict=True)

        return self._seen.mapping(path, nodes, items)

    def _states(
        self,
        names: list[str],
        held: list[Any],
        parameters: list[torch.Tensor],
        key: tuple[str, int],
    ) -> list[Any]:
        """The nodes of a batch of parameters' states."""

        def paths() -> list[str]:
            return [f"{key[0]}.{name}" for name in names]

        def one_by_one() -> list[Any]:
            return list(map(self._parameter_state, held, paths(), parameters))

        flat = Flat.of(held)
        if flat is None:
            return one_by_one()
        kind = Kind.EAGER if self._mark is Volatile else Kind.LAZY
        observed = kind, self._rank, names, flat.shape, self._places_of(parameters)
        nodes, _ = self._batch(key, observed, flat, paths, one_by_one)
        return nodes

    def _batch(
        self,
        key: tuple[str, int],
        observed: Any,
        flat: Flat,
        paths: Callable[[], list[str]],
        one_by_one: Callable[[], list[Any]],
    ) -> tuple[list[Any], bool]:
        """The nodes of dicts of tensors, and whether these are those of the capture before."""
        nodes = self._found.recognised(key, observed, flat.tensors)
        if nodes is not None:
            return flat.with_others(nodes, paths()) if flat.others else nodes, True
        begin = len(self.tensors)
        nodes = one_by_one()
        self._found.remember(key, observed, flat.tensors, begin, nodes)
        return nodes, False

    def _places_of(self, parameters: Sequence[Any]) -> list[Any] | None:
        """All that decides where the states of parameters lie; None where all are this rank's."""
        if not self._replicas and ORDINARY.issuperset(map(type, parameters)):
            return None
        return [
            (layout_of(each), local_of(each).shape)
            if is_dtensor(each)
            else self._replicas.get(id(each))
            for each in parameters
        ]

    def _parameter_state(self, state: Any, path: str, parameter: torch.Tensor) -> Any:
        place, is_whole = self._place(parameter, path), id(parameter) in self._whole

        def place_of(value: torch.Tensor) -> Placed:
            return placements.beside(value, parameter, place)

        def other(value: Any, where: str) -> Any:
            if isinstance(value, torch.Tensor):
                beside = None if is_dtensor(value) else place_of(value)
                how = {"lazy": False, "is_gated": True} if is_whole else {"lazy": True}  # copies
                return self._tensor(value, where, place=beside, **how)
            return self.encoded(value, where)

        if is_whole:
            return values.mapping_of({key: other(state[key], f"{path}.{key}") for key in state})
        kind = Kind.EAGER if self._mark is Volatile else Kind.LAZY
        given = None if place.layout is None else place_of
        return values.mapping_of(self._found.nodes(state, path, kind, given, other))

    def _members_of(self, members: Mapping[Any, Any], path: str) -> list[Any] | None:
        """The nodes of the values of a dict of tensors, or of a dict of such dicts."""
        first = next(iter(members.values()), None)
        if type(first) is dict:
            return self._dicts(members, path)
        if isinstance(first, torch.Tensor) and are_tensors(list(members.values())):
            return self._dict(members, path)
        return None

    def _dict(self, members: Mapping[Any, Any], path: str) -> list[Any]:
        nodes: list[Any] = []
        for begin, keys, tensors in in_batches(members, BATCH):
            paths = [values.join(path, key) for key in keys]

            def one_by_one(tensors: Any = tensors, paths: Any = paths) -> list[Any]:
                return list(map(self._plain_tensor, tensors, paths))

            flat = Flat([tuple(keys)], tensors, others=[])
            nodes += self._plain_batch((path, begin), flat, paths, one_by_one)
        return nodes

    def _dicts(self, members: Mapping[Any, Any], path: str) -> list[Any] | None:
        batches = list(in_batches(members, STATES))
        flats = [flat for _, _, dicts in batches if (flat := Flat.of(dicts)) is not None]
        if len(flats) < len(batches):  # one holds more dicts, or even itself
            return None
        nodes: list[Any] = []
        for (begin, keys, dicts), flat in zip(batches, flats, strict=True):
            paths = [values.join(path, key) for key in keys]

            def one_by_one(dicts: Any = dicts, paths: Any = paths) -> list[Any]:
                return list(map(self._values.one_by_one, dicts, paths))

            nodes += self._plain_batch((path, begin), flat, paths, one_by_one)
        return nodes

    def _plain_batch(
        self,
        key: tuple[str, int],
        flat: Flat,
        paths: list[str],
        one_by_one: Callable[[], list[Any]],
    ) -> list[Any]:
        """_batch() of tensors that come without their module or optimizer."""
        owners = self._owners_of(flat.tensors)
        if owners is None:
            return one_by_one()
        layouts = self._layouts_of(flat.tensors)
        observed = self._mark, self._rank, paths, flat.shape, layouts, owners
        begin = len(self.tensors)
        nodes, is_known = self._batch(key, observed, flat, lambda: paths, one_by_one)
        if is_known:
            self.parameters += [self.tensors[begin + index].spec for index in owners.parameters]
        return nodes

    def _owners_of(self, tensors: list[torch.Tensor]) -> Owners | None:
        """Which of these only the step() of an optimizer changes; None where that is to be asked of
        one tensor at a time."""
        if self._mark is not None:
            return MARKED
        if self._gated_ids.issuperset(map(id, tensors)):
            return Owners([True] * len(tensors), [], [])
        addresses = storage_addresses(tensors)
        if addresses is None:
            return None
        gated = list(map(self._gated.__contains__, addresses))
        if all(gated):
            return Owners(gated, [], [])
        known = self._stepped
        parameters = [
            index
            for index, address in enumerate(addresses)
            if address in known.parameters and not gated[index]
        ]
        return Owners(gated, list(map(known.state.__contains__, addresses)), parameters)

    def _foreign(self, value: Any, path: str) -> Any | None:
        if (node := foreign.torch_node(value)) is not None:
            return node
        return foreign.numpy_node(value, path, self._add_array)

    def _add_array(self, array: torch.Tensor, path: str) -> str:
        return self._found.add(array, path, False, owned=True)

    # -- tensors ---------------------------------------------------------------------------

    def _place(self, tensor: torch.Tensor, path: str) -> Placed:
        if not self._replicas and type(tensor) in ORDINARY:
            return OWN
        return placements.place_of(tensor, path, self._rank, self._replicas)

    def _is_gated(self, tensor: torch.Tensor) -> bool:
        if self._mark is Gated:
            return True
        may_be = bool(self.optimizers) and is_storable(tensor)
        return may_be and storage_of(local_of(tensor)) in self._gated

    @cached_property
    def _owned(self) -> list[torch.Tensor]:
        """The tensors of the optimizers of the state."""
        return list(chain.from_iterable(map(optimizers.owned_tensors, self.optimizers)))

    @cached_property
    def _gated_ids(self) -> set[int]:
        return set(map(id, self._owned))

    @cached_property
    def _gated(self) -> set[int]:
        """The storages of these."""
        return storages(self._owned)

    @cached_property
    def _stepped(self) -> Storages:
        """Those of the optimizers that have stepped."""
        return Storages.of(self._stepping)

    def _plain_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        """A tensor that comes without its module or optimizer, such as one of a state_dict().

        What an optimizer keeps for itself nobody else changes. Parameters are another matter: many
        programs swap them for averages, through `.data`, as soon as save() has returned.
        """
        if self._is_gated(tensor):
            return self._tensor(tensor, path, lazy=True)
        if self._mark is Volatile or not is_storable(tensor):
            return self._tensor(tensor, path, lazy=False)
        known, storage = self._stepped, storage_of(local_of(tensor))
        count = len(self.tensors)
        node = self._tensor(tensor, path, lazy=False, is_gated=storage in known.state)
        if storage in known.parameters:
            self.parameters += [each.spec for each in self.tensors[count:]]
        return node

    def _tensor(
        self,
        tensor: torch.Tensor,
        path: str,
        *,
        lazy: bool,
        place: Placed | None = None,
        is_gated: bool = False,
    ) -> Any:
        local = local_of(tensor)
        self._values.check_depth(tensor, path)
        if subclasses.is_allowed(local):
            made = partial(self._subclass, lazy=lazy, place=place or self._place(tensor, path))
            return self._values.within(made, tensor, path)
        check_storable(tensor, path)
        place = place or self._place(tensor, path)
        wrapper = None if local is tensor else tensor
        eager = self._mark is Volatile or not lazy
        alias, is_complex = local.detach(), tensor.dtype == torch.complex128
        if is_complex:
            alias, place = torch.view_as_real(alias.resolve_conj()), as_real(place)
        added = self._found.add(alias, path, eager, place=place, wrapper=wrapper, is_gated=is_gated)
        if is_complex:
            return {COMPLEX: {"$tensor": added}}
        return {"$tensor": added}

    def _subclass(
        self, to: values.Encoder, tensor: torch.Tensor, path: str, *, lazy: bool, place: Placed
    ) -> Any:
        """A tensor that is made of others: these, and how to put them together."""
        local = local_of(tensor)
        form = subclasses.form_of(local, path, to.depth)
        places = subclasses.places(form, place)
        part = None
        if places is None and place.box is not None and place.shape is not None:
            part = {"offsets": list(place.box.offsets), "of": list(place.shape)}
        whole = local if part else tensor
        inner = {
            name: self._tensor(
                each,
                adapters.inner_path(path, name),
                lazy=lazy or self._is_gated(each),
                place=None if is_dtensor(each) else (places or {}).get(name, OWN),
            )
            for name, each in form.tensors.items()
        }
        shape = place.shape if place.shape and not part else tuple(whole.shape)
        return {
            SUBCLASS: {
                "class": form.kind,
                "context": form.context,
                "shape": list(shape),
                "stride": list(whole.stride()),
                "part": part,
                "tensors": inner,
            }
        }
