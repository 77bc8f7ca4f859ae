"""The tensors that one capture has found: their names, their order, and which of them are one.

Owns: ties; that no name is taken twice; which tensors are recognised from the capture before, and
added without asking again what follows from what they show, many at once or one by one.
Invariants: a recognised tensor is added as it would be in full: the same spec, at the same place of
the order, with the memory and the version that it has now. A tensor at whose address another one
was found, or that is out of the ordinary in any way, is never recognised.
Not here: which tensors a state has, where they lie, and which of them are eager (capture).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from statehold.encoding import header
from statehold.errors import UnsupportedValueError
from statehold.tensors.captured import captured
from statehold.tensors.columns import Tensors, described
from statehold.tensors.facts import read
from statehold.tensors.placements import OWN, Placed
from statehold.tensors.recognition import Key, Seen, SeenBatch
from statehold.tensors.storable import ORDINARY, is_external, memory_of

_is_leaf = attrgetter("is_leaf")
PlaceOf = Callable[[torch.Tensor], Placed]
# (value, its name) -> its node.
NodeOf = Callable[[Any, str], Any]


class Kind(Enum):
    """Which tensors of a container are eager: none, all but parameters, all."""

    LAZY = 0
    OF_MODULE = 1
    EAGER = 2


class Found:
    """What one capture has found so far. `seen`: what the one before saw."""

    def __init__(self, seen: Seen) -> None:
        seen.begin()
        self._seen = seen
        self.tensors = Tensors()
        # By address, or by the id of a DTensor: all ranks have to find the same ties, also those
        # whose box is empty. With the tensors: memory of a temporary that state_dict() made must
        # not be used again while its address stands for it here.
        self._held: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        # Of recognised batches all places, and where in `tensors` the only one at a place is. The
        # latter is seldom asked for, so it waits with the batches: (place in `tensors`, places).
        self._places: set[int] = set()
        self._alone: dict[int, int] = {}
        self._waiting: list[tuple[int, Sequence[int]]] = []
        # Names. Those of recognised batches, which shared none in the capture before, wait, too.
        self._taken: set[str] = set()
        self._batches: list[SeenBatch] = []

    # -- many at once ----------------------------------------------------------------------

    def recognised(self, key: Key, observed: Any, values: Sequence[Any]) -> Any | None:
        """What remember() was given for the same tensors in the capture before, and adds them.

        None, and nothing is added, if any of them shows anything else, or is tied.
        """
        batch = self._seen.batches_before.get(key)
        if batch is None or batch.observed != observed:
            return None
        reading = read(values)
        if reading is None or reading.facts != batch.facts:
            return None
        if not self._taken.isdisjoint(batch.names) or not self._add_places(reading.places):
            return None
        self._batches.append(batch)
        batch.add_to(self.tensors, reading)
        self._seen.batches_now[key] = batch
        return batch.nodes

    def remember(
        self, key: Key, observed: Any, values: Sequence[Any], begin: int, nodes: Any
    ) -> None:
        """Keep what the next capture needs to recognise `values`, which were added one by one from
        tensors[begin] on; nothing if any of them is out of the ordinary."""
        added = self.tensors[begin:]
        reading = read(values) if len(added) == len(values) else None
        if reading is None or not all(map(_is_leaf, reading.tensors)):
            return  # no capture keeps a graph alive
        seen = [(each.spec.name, self._seen.now(each.spec.name)) for each in added]
        sights = {name: sight for name, sight in seen if sight is not None}
        is_usual = all(
            each.spec is sight.spec
            and dtype is sight.dtype  # else a view of another dtype is stored
            and (sight.is_usual or (each.wrapper is not None and not dtype.is_complex))
            for each, dtype, sight in zip(
                added, reading.facts.dtypes, sights.values(), strict=False
            )
        )
        if is_usual and len(sights) == len(values):
            strided = [each.strided for each in added]
            are_gated = [each.is_gated for each in added]
            batch = SeenBatch(observed, reading.facts, sights, strided, are_gated, nodes)
            self._seen.batches_now[key] = batch

    def _add_places(self, places: Sequence[int]) -> bool:
        """Note these places, if no tensor there is tied. 0 is that of a tensor without memory."""
        count = len(self._places) + len(places)
        self._places.update(places)
        are_new = (
            len(self._places) == count
            and 0 not in self._places
            and (not self._held or self._held.keys().isdisjoint(places))
        )
        if are_new:
            self._waiting.append((len(self.tensors), places))
        else:
            self._forget_places()
        return are_new

    def _forget_places(self) -> None:
        """Those that are neither in `_alone` nor wait."""
        self._places = set(self._alone)
        for _, places in self._waiting:
            self._places.update(places)

    def _is_taken(self, name: str) -> bool:
        while self._batches:
            self._taken |= self._batches.pop().names
        return name in self._taken

    def _alone_at(self, place: int) -> int | None:
        """Which tensor of a recognised batch lies at `place`."""
        if place not in self._places:
            return None
        for begin, places in self._waiting:
            self._alone.update(zip(places, count(begin)))
        self._waiting.clear()
        return self._alone[place]

    # -- one by one ------------------------------------------------------------------------

    def nodes(
        self,
        members: Mapping[Any, Any],
        path: str,
        kind: Kind,
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
        place, eager = OWN, kind is Kind.EAGER
        for key, value in members.items():
            name = f"{path}.{key}"
            sight = seen.before(name)
            if sight is not None and type(value) in ORDINARY and not self._is_taken(name):
                if kind is Kind.OF_MODULE:
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
                    seen.saw(name, sight)
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
        place_id = id(wrapper) if wrapper is not None else tensor.data_ptr()
        index = self._index_of(place_id, tensor, wrapper)
        if index is not None:
            first = self.tensors[index]
            is_gated = is_gated and not first.eager
            if eager and not first.owned and (first.spec.eager, first.is_gated) != (True, is_gated):
                self.tensors[index] = captured(
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
        self.tensors.append(captured(tensor, spec, eager, owned, wrapper, is_gated))
        return name

    def _check_new(self, name: str, tensor: torch.Tensor) -> None:
        """Raise UnsupportedValueError if no step can hold a new tensor with this name."""
        problem = ""
        if not name:
            problem = "the path of a tensor consists of empty keys, so the tensor has no name"
        elif not header.is_name(name):
            problem = "safetensors files cannot hold a tensor of this name"
        elif self._is_taken(name):
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
        if (alone := self._alone_at(place_id)) is not None:
            first = self.tensors[alone]
            found = [(alone, first.tensor if first.wrapper is None else first.wrapper), *found]
        for index, held in found:
            if held is wrapper or (wrapper is None and memory_of(held) == memory_of(tensor)):
                return index
        return None
