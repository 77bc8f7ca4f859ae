"""What a capture holds, and how it comes to that. No tensor's bytes move here.

A capture has each tensor of a state with its spec, as it was then; a tree of plain values; copies
of some tensors.

Owns: the walk through a state; which tensors a step holds, and which must be copied at once (eager)
and which may be copied until the next update (lazy):
    lazy    parameters of modules; parameters and state tensors of optimizers in the state, and
            tensors that share their storage; state tensors of optimizers that step through the
            gate, wherever they are found; pieces; what is wrapped in Gated
    eager   everything else: buffers, other tensors, tensors inside state_dict() of objects, tensors
            in param_groups; and whatever is wrapped in Volatile, which wins
Invariants: the memory of a captured tensor stays alive at the address that it had at capture
(columns). The tree shares no container with the live state.
Equal bytes have equal fingerprints on one kind of device; different ones practically never (XXH3-64
on the host). They find accidents, not attackers. A tensor that may change as soon as `save` has
returned is read before; the others are read on the stage thread, before the gate opens.

Not here: modules, optimizers and other objects (kinds), fingerprints of device memory
(devices/fingerprinting), ties and what is recognised from the
capture before (found), what is known of each tensor (columns), the copying (engine, devices), the
layout of the file (plan), layouts (placements).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain, islice, repeat
from operator import and_, not_
from typing import Any

import torch

from statehold.encoding import values
from statehold.errors import annotate
from statehold.layout.layout import Layout
from statehold.layout.plan import TensorSpec
from statehold.tensors import composed, nodes, placements
from statehold.tensors.columns import (
    BATCH,
    Tensors,
    described,
    layout_of,
    storage_addresses,
    together,
)
from statehold.tensors.columns import CapturedTensor as CapturedTensor
from statehold.tensors.composed import COMPLEX, SUBCLASS, as_real
from statehold.tensors.found import Eager, Found, NewTensors, Seen
from statehold.tensors.marks import Gated, Mark, Volatile
from statehold.tensors.placements import OWN, Piece, Placed
from statehold.tensors.stepping import MARKED, Owners, Storages, owned_tensors, storages
from statehold.tensors.storable import (
    ORDINARY,
    KindOf,
    check_storable,
    is_dtensor,
    is_storable,
    local_of,
    storage_of,
)
from statehold.tensors.stored import InFiles, StoredState
from statehold.units import format_bytes

# Parameters handed over without their module are worth a line in the log from here on.
TOLD_BYTES_MIN = 64 << 20

# Eager tensors of devices are cloned while they are no more than this in all: then save() waits for
# nobody. The clones live until their bytes are copied.
CLONED_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class Number:
    """A number in the tree of a step whose value lies on a device, in a tensor of its own."""

    tensor: torch.Tensor
    node: dict[str, Any]
    key: str

    def fill_in(self, value: float) -> None:
        """Put the value in its place. The place is there already: others may read the tree."""
        self.node[self.key] = values.encode(value, self.key)


@dataclass(slots=True)
class Capture:
    """A state at the time of `capture`. `tensors` are distinct in memory; ties are in the tree.

    note: what the user could hand over so that save() returns earlier; "" if nothing.
    doubts: what a restore will not put back, and what the user can do about it now.
    numbers: what of the tree lies on devices, to be filled in before the save is staged.
    stored: the parts of the state that lie in files.
    frozen: the names of the modules' parameters that need no gradient; None without a module.
    """

    tensors: Tensors
    tree: Any
    note: str = ""
    doubts: list[str] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    stored: list[StoredState] = field(default_factory=list)
    frozen: tuple[str, ...] | None = None
    _settled: set[bool] = field(default_factory=set)  # True: eager ones; False: lazy ones
    # Looked up when it is made: a simulation has locks of its own.
    _guard: threading.Lock = field(default_factory=lambda: threading.Lock())

    def release(self) -> None:
        """Give the files of stored parts back to their objects, unless they were handed over."""
        for stored in self.handed_over():
            stored.release()

    def handed_over(self) -> list[StoredState]:
        """The stored parts. Who takes them has to release them."""
        stored, self.stored = self.stored, []
        return stored

    def settle(self, *, eager: bool = False) -> str | None:
        """Declare that lazy (or eager) tensors may change from now on, because they are copied; the
        name of one that already has.

        Asked from the stage thread; for lazy ones from the gate, and for eager ones from save(),
        too. The first to find all unchanged decides, and what changes later was let through.
        """
        with self._guard:
            moved = None if eager in self._settled else self.moved(eager=eager)
            if moved is None:
                self._settled.add(eager)
            return moved

    def moved(self, *, eager: bool) -> str | None:
        """The name of an eager (or of a lazy) tensor that changed since capture, or None."""
        structure = self.tensors.structure
        chosen = structure.eager if eager else structure.lazy
        index = self.tensors.first_moved(chosen)
        return None if index is None else self.tensors.specs[index].name

    def named(self, names: Set[str]) -> list[CapturedTensor]:
        """The tensors of these names, as they are now: `tensor` is an alias that stays so."""
        if not names:
            return []
        specs = enumerate(self.tensors.specs)
        found = [self.tensors[index] for index, spec in specs if spec.name in names]
        return [each._replace(tensor=each.alias) for each in found]


def _owned_copy(each: CapturedTensor) -> CapturedTensor:
    """The same tensor, copied now; a copy on a device is made in the order of its stream."""
    copy = each.tensor.detach().clone(memory_format=torch.contiguous_format)
    return described(each.spec, copy, external=each.external, owned=True)


def clone_what_waits_for_no_device(tensors: Tensors) -> None:
    """Copy small host tensors (columns.SMALL_BYTES) and eager device tensors now; the latter if
    they are small in all and there is memory."""
    structure = tensors.structure
    others, numbers = structure.small_on_host
    copies = {index: _owned_copy(tensors[index]) for index in others}
    eager = [index for index in structure.eager if structure.external[index]]
    if sum(structure.specs[index].nbytes for index in eager) <= CLONED_BYTES_MAX:
        with suppress(torch.OutOfMemoryError):  # then none at all: save() waits in any case
            copies |= {index: _owned_copy(tensors[index]) for index in eager}
    tensors.copied(copies, [(some, together(tensors.live, some)) for some in numbers])


def note_of(parameters: Sequence[TensorSpec]) -> str:
    """The note of a Capture (see there) that was given these without their module."""
    nbytes = sum(spec.nbytes for spec in parameters)
    if nbytes < TOLD_BYTES_MIN:
        return ""
    return (
        f"{format_bytes(nbytes)} of parameters, such as {parameters[0].name}, are copied before "
        "save() returns, because the state has tensors of a state_dict(): pass the module itself "
        "to copy them while training continues"
    )


# -- containers as batches -------------------------------------------------------------------------
# Many small dicts, such as those that an optimizer keeps for its parameters, are flattened without
# Python for each tensor. Plain values of now are put into the nodes of such dicts.


# The states of so many parameters are one batch.
STATES = 128
_PLAIN = {bool, int, float, str, type(None)}


@dataclass(frozen=True, slots=True)
class Flat:
    """Dicts of tensors and plain values. keys, tensors: of all, in their order. counts: of the keys
    of each dict. others: (which dict, key, value) of the plain values."""

    keys: list[Any]
    counts: list[int]
    tensors: list[torch.Tensor]
    others: list[tuple[int, str, Any]]

    @classmethod
    def of(cls, dicts: Sequence[Any]) -> Flat | None:
        """None where something else is among them, or no tensor."""
        if set(map(type, dicts)) != {dict}:
            return None
        keys, counts = list(chain.from_iterable(dicts)), list(map(len, dicts))
        members = list(chain.from_iterable(map(dict.values, dicts)))
        if are_tensors(members):
            return cls(keys, counts, members, [])
        tensors = [value for value in members if isinstance(value, torch.Tensor)]
        others: list[tuple[int, str, Any]] = []
        for index, each in enumerate(dicts if tensors else ()):
            plain = [(index, key, value) for key, value in each.items() if type(value) in _PLAIN]
            if plain and all(map(values.is_plain_key, each)):
                others += plain
        if not tensors or len(tensors) + len(others) < len(members):
            return None
        return cls(keys, counts, tensors, others)

    @property
    def shape(self) -> Any:
        """All there is to know besides the tensors and the plain values."""
        kinds = None
        if set(map(type, self.keys)) != {str}:
            kinds = list(map(type, self.keys))  # True and 1 are equal keys
        return self.keys, self.counts, kinds, [(index, key) for index, key, _ in self.others]

    def new(self, paths: Sequence[str], eager: bool) -> NewTensors:
        """What there is to know of them if they are new (found.New)."""
        keys, each_of = iter(self.keys), zip(paths, self.counts, strict=True)
        names = [{key: f"{path}.{key}" for key in islice(keys, count)} for path, count in each_of]
        made = [{key: {"$tensor": name} for key, name in each.items()} for each in names]
        for index, key, _ in self.others:
            del names[index][key]
        nodes = self.with_others(list(map(values.mapping_of, made)), paths)
        found = list(chain.from_iterable(map(dict.values, names)))
        return found, [eager] * len(found), [False] * len(found), nodes

    def with_others(self, nodes: list[Any], paths: Sequence[str]) -> list[Any]:
        """The nodes of these dicts, by those of dicts with other plain values."""
        more: dict[int, dict[str, Any]] = {}
        for index, key, value in self.others:
            node = values.encode(value, values.join(paths[index], key))
            more.setdefault(index, {})[key] = node
        return [{**node, **more[at]} if at in more else node for at, node in enumerate(nodes)]


def _new(flat: Flat, paths: list[str], owners: Owners, *, are_alone: bool) -> NewTensors:
    """What there is to know of tensors that are new, and come without their module or optimizer
    (found.New). are_alone: they are members of one dict, and in no dict of their own."""
    names, nodes = paths, [{"$tensor": path} for path in paths]
    if not are_alone:
        names, *_, nodes = flat.new(paths, eager=False)
    are_eager = list(map(not_, owners.gated))
    are_gated = list(map(and_, owners.state or repeat(False), are_eager))
    return names, are_eager, are_gated, nodes


def are_tensors(members: Sequence[Any]) -> bool:
    """Whether there are any, and all are tensors."""
    kinds = set(map(type, members))
    return bool(kinds) and all(issubclass(kind, torch.Tensor) for kind in kinds)


def in_batches(members: Mapping[Any, Any], size: int) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """(how many came before, the next keys, their values) of the members of a container."""
    keys, held = list(members), list(members.values())
    for begin in range(0, len(keys), size):
        yield begin, keys[begin : begin + size], held[begin : begin + size]


# -- one capture -----------------------------------------------------------------------------------
# In a job of several ranks a tensor is this rank's box, and its spec says of what: DTensors by
# their placements, what DistributedDataParallel replicates, and the optimizer state of both. All
# else is this rank's own.


class Capturing:
    """One capture: what was found so far.

    rank, world, own: see capture(). entries: of each module of the state, by its id. names: of the
    modules' entries, by their ids. replicas: the layouts of what is replicated, by ids. later: what
    is left to do once everything else has given its state. The others are for Capture.
    """

    entries: Mapping[int, dict[str, Any]]
    names: Mapping[int, str]
    replicas: Mapping[int, Layout]

    def __init__(
        self,
        kind_of: KindOf,
        rank: int | None,
        world: int,
        own: bool,
        optimizers: Iterable[torch.optim.Optimizer],
        stepping: Iterable[torch.optim.Optimizer],
        seen: Seen,
    ) -> None:
        self.rank, self.world, self.own = rank, world, own
        self.seen, self.found = seen, Found(seen)
        self.tensors = self.found.tensors
        self.values = values.Encoder(self._leaf, self._members_of)
        self._kind_of = kind_of
        self.doubts: list[str] = []
        self.numbers: list[Number] = []
        self.stored: list[StoredState] = []
        self.frozen: list[str] = []
        self.later: list[Callable[[], None]] = []
        self._optimizers, self._stepping = optimizers, stepping
        self._parameters: list[TensorSpec] = []  # plain tensors that are those of an optimizer
        self._mark: type[Mark[Any]] | None = None

    def result(self, state: Mapping[str, Any]) -> Capture:
        """Go through the state. Raises UnsupportedValueError."""
        try:
            tree = self.values.encode(dict(state), "")
            for act in self.later:
                act()
            self.seen.structure = self.tensors.recognise(self.seen.structure)
            if any(self.seen.structure.external):
                clone_what_waits_for_no_device(self.tensors)
        except BaseException:
            for stored in self.stored:
                stored.release()
            raise
        finally:  # these refer to this: in a cycle, tensors would wait for a collection
            self.values.leaf = self.values.members = None
            self.later.clear()
        note = note_of(self._parameters)
        frozen = tuple(self.frozen) if self.entries else None
        return Capture(self.tensors, tree, note, self.doubts, self.numbers, self.stored, frozen)

    # -- the walk --------------------------------------------------------------------------

    def inside(self, value: Any, content: Callable[[], Any], path: str) -> Any:
        """The node of what an object gives for itself."""
        with self.values.within(value, path, 0):
            try:
                inside = content()
            except Exception as error:
                when = f'while the state of "{path}" was taken; nothing of the step is saved'
                annotate(error, when)
                raise
            return self.values.encode(inside, path)

    def tell(self, path: str, doubt: str) -> None:
        self.doubts.append(f'a restart may continue differently in "{path}": {doubt}')

    def _leaf(self, value: Any, path: str) -> Any | None:
        """The node of what is not a plain value; None for what no step can hold."""
        if isinstance(value, torch.Tensor):
            return self._plain_tensor(value, path)
        if isinstance(value, Mark):
            return self._marked(value, path)
        if isinstance(value, Piece):
            return self.tensor(value.tensor, path, lazy=True, place=value.at(path, self.rank))
        if isinstance(value, InFiles):
            return {"$tensor": value.name}
        if (found := self._kind_of(value)) is not None:
            kind, thing = found
            return kind.capture(self, thing, path)
        if (node := nodes.torch_node(value)) is not None:
            return node
        return nodes.numpy_node(value, path, partial(self.found.add, eager=False, owned=True))

    def _marked(self, value: Mark[Any], path: str) -> Any:
        outer = self._mark
        if outer is not Volatile:
            self._mark = type(value)
        try:
            return self.inside(value, lambda: value.value, path)
        finally:
            self._mark = outer

    def eager(self, usual: Eager) -> Eager:
        """Which tensors of a container are eager: `usual`, unless it has a mark."""
        return Eager.ALL if self._mark is Volatile else usual

    # -- dicts of tensors ------------------------------------------------------------------

    def _members_of(self, members: Mapping[Any, Any], path: str) -> list[Any] | None:
        """The nodes of the values of a dict of tensors, or of a dict of such dicts."""
        first = next(iter(members.values()), None)
        if type(first) is dict:
            return self._dicts(members, path)
        if not (isinstance(first, torch.Tensor) and are_tensors(list(members.values()))):
            return None
        nodes: list[Any] = []
        for begin, keys, tensors in in_batches(members, BATCH):
            paths = [values.join(path, key) for key in keys]
            flat = Flat(keys, [len(keys)], tensors, others=[])
            nodes += self._plain_batch((path, begin), flat, paths, self._plain_tensor, tensors)
        return nodes

    def _dicts(self, members: Mapping[Any, Any], path: str) -> list[Any] | None:
        batches = list(in_batches(members, STATES))
        flats = [flat for _, _, dicts in batches if (flat := Flat.of(dicts)) is not None]
        if len(flats) < len(batches):  # one holds more dicts, or even itself
            return None
        nodes: list[Any] = []
        for (begin, keys, dicts), flat in zip(batches, flats, strict=True):
            paths = [values.join(path, key) for key in keys]
            nodes += self._plain_batch((path, begin), flat, paths, self.values.one_by_one, dicts)
        return nodes

    def _plain_batch(
        self,
        key: tuple[str, int],
        flat: Flat,
        paths: list[str],
        node_of: Callable[[Any, str], Any],
        members: list[Any],
    ) -> list[Any]:
        """The nodes of tensors that come without their module or optimizer."""

        def one_by_one() -> list[Any]:
            return list(map(node_of, members, paths))

        owners = self._owners_of(flat.tensors)
        if owners is None:
            return one_by_one()
        layouts = self.layouts_of(flat.tensors)
        observed = self._mark, self.rank, paths, flat.shape, layouts, owners
        begin = len(self.tensors)
        new = None
        if key not in self.seen.before.batches and layouts is None and owners is not MARKED:
            has_depth = self.values.depth + 2 <= values.DEPTH_MAX
            if has_depth and all(paths) and all(map(values.is_plain_key, flat.keys)):
                new = partial(_new, flat, paths, owners, are_alone=members is flat.tensors)
        nodes: list[Any]
        nodes, is_known = self.found.batch(key, observed, flat.tensors, one_by_one, new)
        if is_known:
            self._parameters += [self.tensors[begin + index].spec for index in owners.parameters]
            return flat.with_others(nodes, paths) if flat.others else nodes
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

    # -- tensors ---------------------------------------------------------------------------

    def layouts_of(self, tensors: Iterable[Any]) -> list[Any] | None:
        """The layouts of those that DistributedDataParallel replicates."""
        return list(map(self.replicas.get, map(id, tensors))) if self.replicas else None

    def places_of(self, parameters: Sequence[Any]) -> list[Any] | None:
        """All that decides where the states of parameters lie; None where all are this rank's."""
        if not self.replicas and ORDINARY.issuperset(map(type, parameters)):
            return None
        return [
            (layout_of(each), local_of(each).shape)
            if is_dtensor(each)
            else self.replicas.get(id(each))
            for each in parameters
        ]

    def place(self, tensor: torch.Tensor, path: str) -> Placed:
        if not self.replicas and type(tensor) in ORDINARY:
            return OWN
        return placements.place_of(tensor, path, self.rank, self.replicas)

    def _is_gated(self, tensor: torch.Tensor) -> bool:
        if self._mark is Gated:
            return True
        may_be = bool(self._optimizers) and is_storable(tensor)
        return may_be and storage_of(local_of(tensor)) in self._gated

    @cached_property
    def _owned(self) -> list[torch.Tensor]:
        """The tensors of the optimizers of the state."""
        return list(chain.from_iterable(map(owned_tensors, self._optimizers)))

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
            return self.tensor(tensor, path, lazy=True)
        if self._mark is Volatile or not is_storable(tensor):
            return self.tensor(tensor, path, lazy=False)
        known, storage = self._stepped, storage_of(local_of(tensor))
        count = len(self.tensors)
        node = self.tensor(tensor, path, lazy=False, is_gated=storage in known.state)
        if storage in known.parameters:
            self._parameters += [each.spec for each in self.tensors[count:]]
        return node

    def tensor(
        self,
        tensor: torch.Tensor,
        path: str,
        *,
        lazy: bool,
        place: Placed | None = None,
        is_gated: bool = False,
    ) -> Any:
        """The node of a tensor that lies at `place`."""
        local = local_of(tensor)
        self.values.check_depth(tensor, path)
        if composed.is_allowed(local):
            with self.values.within(tensor, path):
                return self._subclass(tensor, path, lazy, place or self.place(tensor, path))
        check_storable(tensor, path)
        place = place or self.place(tensor, path)
        wrapper = None if local is tensor else tensor
        eager = self._mark is Volatile or not lazy
        alias, is_complex = local.detach(), tensor.dtype == torch.complex128
        if is_complex:
            alias, place = torch.view_as_real(alias.resolve_conj()), as_real(place)
        added = self.found.add(alias, path, eager, place=place, wrapper=wrapper, is_gated=is_gated)
        return {COMPLEX: {"$tensor": added}} if is_complex else {"$tensor": added}

    def _subclass(self, tensor: torch.Tensor, path: str, lazy: bool, place: Placed) -> Any:
        """A tensor that is made of others: these, and how to put them together."""
        local = local_of(tensor)
        form = composed.form_of(local, path, self.values.depth)
        places = composed.places(form, place)
        part = None
        if places is None and place.box is not None and place.shape is not None:
            part = {"offsets": list(place.box.offsets), "of": list(place.shape)}
        whole = local if part else tensor
        inner = {
            name: self.tensor(
                each,
                composed.inner_path(path, name),
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


# -- fingerprints ----------------------------------------------------------------------------------
HashMemory = Callable[[int, int], int]


def begin_fingerprints(
    captured: Iterable[CapturedTensor], hash_memory: HashMemory
) -> dict[str, Callable[[], int]]:
    """By name, what to call on the stage thread for the fingerprint of each host tensor."""
    found = dict[str, Callable[[], int]]()
    for each in captured:
        if not each.external:
            read = cache(partial(fingerprint_on_host, each.tensor, hash_memory))
            if each.eager:  # it may change as soon as save() has returned
                read()
            found[each.spec.name] = read
    return found


def fingerprint_on_host(tensor: torch.Tensor, hash_memory: HashMemory) -> int:
    """XXH3-64 of the elements in C order."""
    dense = tensor.contiguous()
    return hash_memory(dense.data_ptr(), dense.numel() * dense.element_size())
