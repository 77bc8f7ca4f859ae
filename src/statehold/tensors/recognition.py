"""What one capture saw of each tensor, and of each batch of them, for the next one.

Owns: the facts that decide a tensor's spec, by the tensor's name, with the spec; what batches of
tensors showed together, by their path; the nodes of containers, and the structure of all.
Invariants: only facts are kept, and never a tensor. What is equal in the next capture is the same
object: it is not made again, and plans find at once that nothing has changed.
Not here: which tensors are recognised by these facts (found).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from statehold.encoding import values
from statehold.encoding.header import bytes_of
from statehold.errors import UnsupportedValueError
from statehold.layout.layout import AnyLayout, Layout
from statehold.layout.plan import TensorSpec
from statehold.tensors import dtypes
from statehold.tensors.columns import ColumnRun, Form, Structure, Tensors
from statehold.tensors.facts import BatchFacts, Facts
from statehold.tensors.placements import Placed
from statehold.tensors.storable import Strided


@dataclass(frozen=True, slots=True)
class Sight:
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
    """

    __slots__ = ("_run", "facts", "names", "nodes", "observed", "sights")

    def __init__(
        self,
        observed: Any,
        facts: Facts,
        sights: dict[str, Sight],
        strided: list[Strided | None],
        are_gated: list[bool],
        nodes: Any,
    ) -> None:
        self.observed, self.facts, self.sights, self.nodes = observed, facts, sights, nodes
        self.names = frozenset(sights)
        self._run = ColumnRun(
            [sight.spec for sight in sights.values()],
            list(map(Form, facts.dtypes, facts.shapes, facts.strides, facts.devices)),
            strided,
            [device >= 0 for device in facts.devices],
            [False] * len(sights),  # owned
            are_gated,
        )

    def add_to(self, tensors: Tensors, reading: BatchFacts) -> None:
        """The tensors of a reading with equal facts."""
        _, live, storages, impls, versions, addresses, wrappers, _ = reading
        tensors.extend(self._run, live, storages, impls, versions, addresses, wrappers)


# Where a batch was found: the path, and how many were found there before it.
Key = tuple[str, int]


class _Mapping(NamedTuple):
    """The node of a container, and the nodes that it was made of."""

    parts: list[Any]
    node: Any


class Seen:
    """What was seen in the capture that is under way, and in the one before it: batches, the sights
    of what is in none, nodes of containers, and the structure of all."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.batches_before: dict[Key, SeenBatch] = {}
        self.batches_now: dict[Key, SeenBatch] = {}
        self._mappings_before: dict[str, _Mapping] = {}
        self._mappings_now: dict[str, _Mapping] = {}
        self._before: dict[str, Sight] = {}
        self._now: dict[str, Sight] = {}
        self._in_batches: dict[str, Sight] | None = None

    def begin(self) -> None:
        """Of a capture."""
        self._before, self._now = self._now, {}
        self.batches_before, self.batches_now = self.batches_now, {}
        self._mappings_before, self._mappings_now = self._mappings_now, {}
        self._in_batches = None

    def mapping(
        self, path: str, parts: list[Any], items: Callable[[], Iterable[tuple[Any, Any]]]
    ) -> Any:
        """The node of the container at `path`, whose members make the nodes `parts`; the one of the
        capture before, where all of these are the same objects."""
        known = self._mappings_before.get(path)
        if known is None or list(map(id, known.parts)) != list(map(id, parts)):
            known = _Mapping(parts, values.mapping_of(dict(items())))
        self._mappings_now[path] = known
        return known.node

    def before(self, name: str) -> Sight | None:
        """How the capture before saw the tensor of this name."""
        if (sight := self._before.get(name)) is not None:
            return sight
        if self._in_batches is None:
            self._in_batches = {}
            for batch in self.batches_before.values():
                self._in_batches |= batch.sights
        return self._in_batches.get(name)

    def now(self, name: str) -> Sight | None:
        """How this capture saw the tensor, if it was asked about it alone."""
        return self._now.get(name)

    def saw(self, name: str, sight: Sight) -> None:
        self._now[name] = sight

    def spec_of(self, tensor: torch.Tensor, name: str, eager: bool, place: Placed) -> TensorSpec:
        """The spec of a tensor that lies at `place`. Raises UnsupportedValueError."""
        dtype, shape = tensor.dtype, tensor.shape
        known = self.before(name)
        if known is None or (dtype, shape, eager, place) != (
            known.dtype,
            known.shape,
            known.eager,
            known.place,
        ):
            spec = _spec(tensor, name, eager, place)
            is_usual = spec.nbytes > 0 and not dtype.is_complex
            known = Sight(dtype, shape, eager, place, spec, is_usual)
        self._now[name] = known
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


def _packs_evenly(layout: AnyLayout, shape: tuple[int, ...], packed: tuple[int, ...]) -> bool:
    """Whether a layout cuts the packed shape where it cuts the other."""
    if not isinstance(layout, Layout):
        return False
    return layout.largest_box(packed).shape[-1] == 2 * layout.largest_box(shape).shape[-1]
