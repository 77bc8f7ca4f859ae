"""The tensors that one capture has found: their names, their order, and which of them are one.

Owns: ties; that no name is taken twice; which tensors are recognised from the capture before, and
added without asking again what follows from what they show, many at once or one by one.
Invariants: a recognised tensor is added as it would be in full: the same spec, at the same place of
the order, with the memory and the version that it has now. A tensor at whose address another one
was found, or that is out of the ordinary in any way, is never recognised.

Not here: which tensors a state has, where they lie, and which of them are eager (captured).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from statehold.encoding import header, values
from statehold.encoding.header import bytes_of
from statehold.errors import UnsupportedValueError
from statehold.layout.layout import AnyLayout, Layout
from statehold.layout.plan import TensorSpec
from statehold.tensors import dtypes
from statehold.tensors.columns import (
    BatchFacts,
    CapturedTensor,
    ColumnRun,
    Facts,
    Form,
    Structure,
    Tensors,
    described,
    forms_of,
    read,
)
from statehold.tensors.placements import OWN, Placed
from statehold.tensors.storable import (
    ORDINARY,
    Strided,
    is_external,
    is_view_of_other_values,
    memory_of,
    strides_of,
)

# -- what the next capture recognises --------------------------------------------------------------
# The facts that decide a tensor's spec are kept by the tensor's name, with the spec. What batches
# of tensors showed together is kept by their path. The nodes of containers and the structure of all
# are kept, too, and never a tensor. What is equal in the next capture is the same object: it is not
# made again, and plans find at once that nothing has changed.


class Sight(NamedTuple):
    """What a tensor that lies at `place` showed, and what follows from that.

    is_usual: it has elements, and its dtype has no conjugate views.
    """

    dtype: torch.dtype
    shape: torch.Size
    eager: bool
    place: Placed
    spec: TensorSpec
    is_usual: bool


class SeenBatch:
    """What tensors showed that were found one after the other, each as one of its own.

    observed: all else that decided names, places and kinds, by equality. nodes: what came of it.
    run: the columns of these tensors.
    sights: None for usual tensors of this rank alone.
    """

    __slots__ = ("_sights", "facts", "names", "nodes", "observed", "run")

    def __init__(
        self,
        observed: Any,
        facts: Facts,
        specs: list[TensorSpec],
        forms: list[Form],
        strided: list[Strided | None],
        are_gated: list[bool],
        nodes: Any,
        sights: dict[str, Sight] | None = None,
    ) -> None:
        self.observed, self.facts, self._sights, self.nodes = observed, facts, sights, nodes
        self.names = frozenset([spec.name for spec in specs])
        external, owned = [device >= 0 for device in facts.devices], [False] * len(specs)
        self.run = ColumnRun(specs, forms, strided, external, owned, are_gated)

    @property
    def sights(self) -> dict[str, Sight]:
        """By name. They are seldom asked for, and a state has many."""
        if self._sights is None:
            specs, forms = self.run.columns[:2]
            self._sights = {
                spec.name: Sight(form.dtype, form.shape, spec.eager, OWN, spec, True)
                for spec, form in zip(specs, forms, strict=True)
            }
        return self._sights


# Of new tensors: names, whether each is eager, whether each of those is gated, and the nodes.
NewTensors = tuple[list[str], list[bool], list[bool], Any]
New = Callable[[], NewTensors]
# Where a batch was found: the path, and how many were found there before it.
Key = tuple[str, int]


class _Mapping(NamedTuple):
    """The node of a container, and the nodes that it was made of."""

    parts: list[Any]
    node: Any


@dataclass
class Look:
    """What one capture has seen: batches, where their tensors lie, the sights of what is in none,
    nodes of containers."""

    batches: dict[Key, SeenBatch] = field(default_factory=dict)
    places: list[Sequence[int]] = field(default_factory=list)
    sights: dict[str, Sight] = field(default_factory=dict)
    mappings: dict[str, _Mapping] = field(default_factory=dict)

    def sight(self, name: str) -> Sight | None:
        """How it saw the tensor of this name. For the next capture, when nothing is added."""
        return self.sights.get(name) or self.in_batches.get(name)

    @cached_property
    def in_batches(self) -> dict[str, Sight]:
        return {
            name: each for batch in self.batches.values() for name, each in batch.sights.items()
        }


class Seen:
    """What was seen in the capture that is under way (now), and in the one before it; the structure
    of all."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.before, self.now = Look(), Look()

    def mapping(
        self, path: str, parts: list[Any], items: Callable[[], Iterable[tuple[Any, Any]]]
    ) -> Any:
        """The node of the container at `path`, whose members make the nodes `parts`; the one of the
        capture before, where all of these are the same objects."""
        known = self.before.mappings.get(path)
        if known is None or list(map(id, known.parts)) != list(map(id, parts)):
            known = _Mapping(parts, values.mapping_of(dict(items())))
        self.now.mappings[path] = known
        return known.node

    def spec_of(self, tensor: torch.Tensor, name: str, eager: bool, place: Placed) -> TensorSpec:
        """The spec of a tensor that lies at `place`. Raises UnsupportedValueError."""
        dtype, shape = tensor.dtype, tensor.shape
        known = self.before.sight(name)
        if known is None or known[:4] != (dtype, shape, eager, place):
            spec = _spec(tensor, name, eager, place)
            is_usual = spec.nbytes > 0 and not dtype.is_complex
            known = Sight(dtype, shape, eager, place, spec, is_usual)
        self.now.sights[name] = known
        return known.spec


def _spec(tensor: torch.Tensor, name: str, eager: bool, place: Placed) -> TensorSpec:
    dtype = tensor.dtype
    shape = dtypes.stored_shape(dtype, tuple(tensor.shape), name)
    code, nbytes = dtypes.code_of(dtype, name), tensor.numel() * tensor.element_size()
    if bytes_of(code, shape) != nbytes:
        raise UnsupportedValueError(
            "a tensor has a shape that no step can hold",
            facts={"path": name, "expected": "less than 2**60 bytes", "got": f"shape {shape}"},
            hint="leave it out, or store it in another shape",
        )
    if place.layout is None or place.shape is None or place.box is None:
        return TensorSpec(name, code, shape, nbytes, eager)
    whole = dtypes.stored_shape(dtype, place.shape, name)
    if whole is not place.shape and not _packs_evenly(place.layout, place.shape, whole):
        raise UnsupportedValueError(
            "a tensor of packed 4-bit values is split unevenly along its last dimension",
            facts={"path": name, "shape": list(place.shape)},
            hint="split it along another dimension",
        )
    offsets = dtypes.stored_shape(dtype, place.box.offsets, name)
    return TensorSpec(name, code, shape, nbytes, eager, place.layout, whole, offsets)


@lru_cache(1 << 12)  # a state has few shapes
def _stored(dtype: torch.dtype, shape: torch.Size) -> tuple[str, tuple[int, ...], int] | None:
    """Code, shape and bytes in a step of a usual tensor (Sight); None for any other."""
    with suppress(UnsupportedValueError):
        code, kept = dtypes.code_of(dtype, ""), dtypes.stored_shape(dtype, tuple(shape), "")
        nbytes = bytes_of(code, kept)
        return (code, kept, nbytes) if nbytes and not dtype.is_complex else None
    return None


def _packs_evenly(layout: AnyLayout, shape: tuple[int, ...], packed: tuple[int, ...]) -> bool:
    """Whether a layout cuts the packed shape where it cuts the other."""
    if not isinstance(layout, Layout):
        return False
    return layout.largest_box(packed).shape[-1] == 2 * layout.largest_box(shape).shape[-1]


# -- the tensors of one capture --------------------------------------------------------------------


_is_leaf = attrgetter("is_leaf")
PlaceOf = Callable[[torch.Tensor], Placed]
# (value, its name) -> its node.
NodeOf = Callable[[Any, str], Any]


class Eager(Enum):
    """Which tensors of a container are copied at once."""

    NONE = 0
    BUT_PARAMETERS = 1
    ALL = 2


class Found:
    """What one capture has found so far. `seen`: what the one before saw."""

    def __init__(self, seen: Seen) -> None:
        seen.before, seen.now = seen.now, Look()
        self._seen = seen
        self.tensors = Tensors()
        # By address, or by the id of a DTensor: all ranks have to find the same ties, also those
        # whose box is empty. With the tensors: memory of a temporary that state_dict() made must
        # not be used again while its address stands for it here.
        self._held: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        # Of recognised batches, where in `tensors` the only one at a place is. That is seldom asked
        # for while all lie where they lay, so it waits: (place in `tensors`, places).
        self._alone: dict[int, int] = {}
        self._waiting: list[tuple[int, Sequence[int]]] = []
        self._lie_as_before = True  # the batches so far
        # Names. Those of recognised batches, which shared none in the capture before, wait, too.
        self._taken: set[str] = set()
        self._batches: list[SeenBatch] = []

    # -- many at once ----------------------------------------------------------------------

    def batch(
        self,
        key: Key,
        observed: Any,
        values: list[Any],
        one_by_one: Callable[[], Any],
        new: New | None = None,
    ) -> tuple[Any, bool]:
        """The nodes of these tensors, and whether they were added together: the capture before had
        the same ones, or none has seen any. Otherwise `one_by_one` adds them and makes the nodes.

        new: what tensors of this rank alone are like that no capture has seen.
        """
        nodes = self._recognised(key, observed, values, new)
        if nodes is not None:
            return nodes, True
        begin = len(self.tensors)
        nodes = one_by_one()
        self._remember(key, observed, values, begin, nodes)
        return nodes, False

    def _recognised(
        self, key: Key, observed: Any, values: list[Any], new: New | None
    ) -> Any | None:
        """Add these together: the nodes of the capture before, or those of new ones. None, and
        nothing is added, if any of them shows anything else, or is tied, or is new and out of the
        ordinary."""
        batch = self._seen.before.batches.get(key)
        if (new if batch is None else batch.observed == observed) in (None, False):
            return None
        reading = read(values)
        if reading is not None and batch is None and new is not None:
            batch = self._learned(observed, reading, new())
        if reading is None or batch is None or reading.facts != batch.facts:
            return None
        if not self._taken.isdisjoint(batch.names) or not self._add_places(reading.places):
            return None
        self._batches.append(batch)
        self.tensors.extend(batch.run, reading.live)
        self._seen.now.batches[key] = batch
        return batch.nodes

    def _learned(self, observed: Any, reading: BatchFacts, new: NewTensors) -> SeenBatch | None:
        """What there would be to remember of tensors, had they been added one by one."""
        (names, are_eager, are_gated, nodes), before = new, self._seen.before
        forms = forms_of(reading.live.tensors, reading.facts.devices)
        stored: list[Any] = [_stored(form.dtype, form.shape) for form in forms]
        looks = before.sights.keys(), before.in_batches.keys()
        are_new = not self._is_any_taken(names) and all(look.isdisjoint(names) for look in looks)
        are_usual = None not in stored and all(map(_is_leaf, reading.live.tensors))
        if not (are_new and are_usual and header.are_names(names)) or reading.facts.layouts:
            return None
        specs = map(TensorSpec, names, *zip(*stored, strict=True), are_eager)
        strided = list(map(strides_of, reading.live.tensors))
        return SeenBatch(observed, reading.facts, list(specs), forms, strided, are_gated, nodes)

    def _remember(self, key: Key, observed: Any, values: list[Any], begin: int, nodes: Any) -> None:
        """Keep what the next capture needs to recognise `values`, which were added one by one from
        tensors[begin] on; nothing if any of them is out of the ordinary."""
        added = self.tensors[begin:]
        reading = read(values) if len(added) == len(values) else None
        if reading is None or not all(map(_is_leaf, reading.live.tensors)):
            return  # no capture keeps a graph alive
        alone = self._seen.now.sights
        names = [each.spec.name for each in added]
        sights = {name: alone[name] for name in names if name in alone}
        forms = forms_of(reading.live.tensors, reading.facts.devices)
        is_usual = all(
            each.spec is sight.spec
            and form.dtype is sight.dtype  # else a view of another dtype is stored
            and (sight.is_usual or (each.wrapper is not None and not form.dtype.is_complex))
            for each, form, sight in zip(added, forms, sights.values(), strict=False)
        )
        if is_usual and len(sights) == len(values):
            strided = [each.strided for each in added]
            are_gated = [each.is_gated for each in added]
            specs, facts = [each.spec for each in added], reading.facts
            batch = SeenBatch(observed, facts, specs, forms, strided, are_gated, nodes, sights)
            self._seen.now.batches[key] = batch

    def _add_places(self, places: list[int]) -> bool:
        """Note these places, if no tensor there is tied."""
        now, before = self._seen.now.places, self._seen.before.places
        # Equal numbers were found to differ from each other then.
        lie_as_before = self._lie_as_before and before[len(now) : len(now) + 1] == [places]
        are_new = (lie_as_before or self._are_apart(places)) and (
            not self._held or self._held.keys().isdisjoint(places)
        )
        if are_new:
            self._lie_as_before = lie_as_before
            now.append(places)
            self._waiting.append((len(self.tensors), places))
        return are_new

    def _are_apart(self, places: list[int]) -> bool:
        """Whether these differ from each other and from all so far. 0 is the place of a tensor
        without memory."""
        alone = set(places)
        return (
            len(alone) == len(places) and 0 not in alone and self._places.keys().isdisjoint(alone)
        )

    @property
    def _places(self) -> dict[int, int]:
        """The places of recognised batches, and which tensor lies there."""
        for begin, places in self._waiting:
            self._alone.update(zip(places, count(begin)))
        self._waiting.clear()
        return self._alone

    def _is_any_taken(self, names: Iterable[str]) -> bool:
        while self._batches:
            self._taken |= self._batches.pop().names
        return not self._taken.isdisjoint(names)

    # -- one by one ------------------------------------------------------------------------

    def nodes(
        self,
        members: Iterable[tuple[Any, Any]],
        path: str,
        usual: Eager,
        place_of: PlaceOf | None,
        node_of: NodeOf,
    ) -> dict[Any, Any]:
        """The nodes of the members of a container, by key, in their order. Adds the tensors that
        are recognised; of any other value `node_of` makes the node.

        place_of: where a plain tensor of the container lies; None: all are this rank's own.
        """
        # One loop that calls little Python: a state has tens of thousands of tensors, and each
        # microsecond is one of the trainer's.
        tensors, held, taken, seen = self.tensors, self._held, self._taken, self._seen
        nodes: dict[Any, Any] = {}
        place, eager = OWN, usual is Eager.ALL
        for key, value in members:
            name = f"{path}.{key}"
            sight = seen.before.sight(name)
            if sight is not None and type(value) in ORDINARY and not self._is_any_taken((name,)):
                if usual is Eager.BUT_PARAMETERS:
                    eager = not isinstance(value, nn.Parameter)
                try:
                    address = value.data_ptr()
                    if place_of is not None:
                        place = place_of(value)
                    is_known = (
                        address != 0  # that of a meta tensor
                        and address not in held
                        and address not in self._places
                        and value.shape == sight.shape
                        and value.dtype is sight.dtype
                        and eager is sight.eager
                        and (place is sight.place or place == sight.place)
                        and sight.is_usual
                        and not value.is_neg()
                        and not value.is_inference()
                    )
                except RuntimeError:  # it has no memory, or no shape: a sparse or nested tensor
                    is_known = False
                if is_known:
                    seen.now.sights[name] = sight
                    taken.add(name)
                    alias = value.detach()
                    held[address] = [(len(tensors), alias)]
                    tensors.append(described(sight.spec, alias, external=is_external(alias)))
                    nodes[key] = {"$tensor": name}
                    continue
            nodes[key] = node_of(value, name)
        return nodes

    def add(
        self,
        tensor: torch.Tensor,
        name: str,
        eager: bool,
        *,
        owned: bool = False,
        place: Placed = OWN,
        wrapper: torch.Tensor | None = None,
        is_gated: bool = False,
    ) -> str:
        """Add a tensor that lies at `place`; the name under which it is found, which is that of
        the first one where it is tied. Raises UnsupportedValueError."""
        if type(tensor) not in ORDINARY:  # an alias of an ordinary one
            hint = "save outside of FakeTensorMode, and of other modes that make tensors of a class"
            problem = "a mode of torch shows a tensor without its memory"
            raise UnsupportedValueError(problem, facts={"path": name}, hint=hint)
        place_id = id(wrapper) if wrapper is not None else tensor.data_ptr()
        index = self._index_of(place_id, tensor, wrapper)
        if index is not None:
            first = self.tensors[index]
            is_gated = is_gated and not first.eager
            if eager and not first.owned and (first.spec.eager, first.is_gated) != (True, is_gated):
                self.tensors[index] = _captured(
                    first.tensor, first.spec, True, wrapper=wrapper, is_gated=is_gated
                )
            return first.spec.name
        self._check_new(name, tensor)
        if wrapper is not None:
            self._held[place_id].append((len(self.tensors), wrapper))
        elif place_id and tensor.numel():
            self._held[place_id].append((len(self.tensors), tensor))
        self._taken.add(name)
        spec = self._seen.spec_of(tensor, name, eager, place)
        self.tensors.append(_captured(tensor, spec, eager, owned, wrapper, is_gated))
        return name

    def _check_new(self, name: str, tensor: torch.Tensor) -> None:
        """Raise UnsupportedValueError if no step can hold a new tensor with this name."""
        problem = ""
        if not name:
            problem = "the path of a tensor consists of empty keys, so the tensor has no name"
        elif not header.are_names([name]):
            problem = "safetensors files cannot hold a tensor of this name"
        elif self._is_any_taken((name,)):
            problem = "two tensors of the state have the same name"
        if problem:
            hint = "names are joined with dots: rename a key of the dicts on the way"
            facts = {"path": name if name.isprintable() and name else ascii(name)}
            raise UnsupportedValueError(problem, facts=facts, hint=hint)

    def _index_of(
        self, place_id: int, tensor: torch.Tensor, wrapper: torch.Tensor | None
    ) -> int | None:
        """Where the same DTensor, or the same elements of memory, were found before."""
        found = self._held.get(place_id, [])
        if (alone := self._places.get(place_id)) is not None:
            first = self.tensors[alone]
            found = [(alone, first.tensor if first.wrapper is None else first.wrapper), *found]
        for index, held in found:
            if held is wrapper or (wrapper is None and memory_of(held) == memory_of(tensor)):
                return index
        return None


def _captured(
    tensor: torch.Tensor,
    spec: TensorSpec,
    eager: bool,
    owned: bool = False,
    wrapper: torch.Tensor | None = None,
    is_gated: bool = False,
) -> CapturedTensor:
    if is_view_of_other_values(tensor):
        tensor, owned = tensor.resolve_conj().resolve_neg(), True
    if tensor.is_inference():
        is_gated, eager = False, True
    if spec.eager is not eager:
        spec = spec._replace(eager=eager)
    return described(
        spec,
        tensor,
        external=is_external(tensor),
        owned=owned,
        is_gated=is_gated and eager,
        wrapper=None if owned else wrapper,
    )
