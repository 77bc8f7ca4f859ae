"""What one capture saw of each tensor, and of each batch of them, for the next one.

Owns: the facts that decide a tensor's spec and strides, by the tensor's name, with both; and what
batches of tensors showed together, by their path.
Invariants: only facts are kept, and never a tensor. What is equal in the next capture is the same
object: it is not made again, and plans find at once that nothing has changed.
Not here: which tensors are recognised by these facts (found).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import Layout
from statehold.layout.plan import TensorSpec
from statehold.tensors import dtypes
from statehold.tensors.captured import Tensors
from statehold.tensors.facts import Facts, Reading
from statehold.tensors.placements import Placed
from statehold.tensors.storable import Strided, is_external, strides_of

__all__ = ["Batch", "Seen", "Sight"]


@dataclass(frozen=True, slots=True)
class Sight:
    """What a tensor that lies at `place` showed, and what follows from that.

    is_usual: it has elements, and its dtype has no conjugate views.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    eager: bool
    place: Placed
    spec: TensorSpec
    strided: Strided | None
    is_usual: bool


class Batch:
    """What tensors showed that were found one after the other, each as one of its own.

    observed: all else that decided names, places and kinds, by equality. nodes: what came of it.
    """

    __slots__ = ("_are_gated", "_specs", "_strided", "facts", "nodes", "observed", "sights")

    def __init__(
        self,
        observed: Any,
        facts: Facts,
        sights: dict[str, Sight],
        are_gated: list[bool],
        nodes: Any,
    ) -> None:
        self._are_gated = are_gated
        self.observed, self.facts, self.sights, self.nodes = observed, facts, sights, nodes
        self._specs = [sight.spec for sight in sights.values()]
        self._strided = [sight.strided for sight in sights.values()]

    def add_to(self, tensors: Tensors, reading: Reading) -> None:
        """The tensors of a reading with equal facts."""
        nothing = repeat(False, len(self._specs))
        tensors.extend(
            self._specs,
            reading.aliases,
            reading.versions,
            reading.addresses,
            self._strided,
            map(is_external, reading.aliases),
            nothing,  # owned
            reading.wrappers,
            self._are_gated,
        )


# Where a batch was found: the path, and how many were found there before it.
Key = tuple[str, int]


class Seen:
    """What was seen in the capture that is under way, and in the one before it: sights by name,
    and batches."""

    def __init__(self) -> None:
        self.before: dict[str, Sight] = {}
        self.now: dict[str, Sight] = {}
        self.batches_before: dict[Key, Batch] = {}
        self.batches_now: dict[Key, Batch] = {}

    def begin(self) -> None:
        """Of a capture."""
        self.before, self.now = self.now, {}
        self.batches_before, self.batches_now = self.batches_now, {}

    def spec_of(self, tensor: torch.Tensor, name: str, eager: bool, place: Placed) -> TensorSpec:
        """The spec of a tensor that lies at `place`. Raises UnsupportedValueError."""
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        known = self.before.get(name)
        if known is None or (dtype, shape, stride, eager, place) != (
            known.dtype,
            known.shape,
            known.stride,
            known.eager,
            known.place,
        ):
            spec = _spec(tensor, name, eager, place)
            is_usual = spec.nbytes > 0 and not dtype.is_complex
            strided = strides_of(tensor)
            known = Sight(dtype, shape, stride, eager, place, spec, strided, is_usual)
        self.now[name] = known
        return known.spec


def _spec(tensor: torch.Tensor, name: str, eager: bool, place: Placed) -> TensorSpec:
    dtype = tensor.dtype
    shape = dtypes.stored_shape(dtype, tuple(tensor.shape), name)
    code, nbytes = dtypes.code_of(dtype, name), tensor.numel() * tensor.element_size()
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


def _packs_evenly(layout: Layout, shape: tuple[int, ...], packed: tuple[int, ...]) -> bool:
    """Whether a layout cuts the packed shape where it cuts the other."""
    return layout.largest_box(packed).shape[-1] == 2 * layout.largest_box(shape).shape[-1]
