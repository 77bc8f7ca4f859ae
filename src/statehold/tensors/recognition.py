"""What one capture saw of each tensor, for the next one.

Owns: the facts that decide a tensor's spec and strides, by the tensor's name, with both.
Invariants: only facts are kept, and never a tensor. What is equal in the next capture is the same
object: it is not made again, and plans find at once that nothing has changed.
Not here: which tensors are recognised by these facts (found).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import Layout
from statehold.layout.plan import TensorSpec
from statehold.tensors import dtypes
from statehold.tensors.placements import Placed
from statehold.tensors.storable import Strided, strides_of

__all__ = ["Seen", "Sight"]


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


class Seen:
    """The sights of the capture that is under way, and of the one before it, by name."""

    def __init__(self) -> None:
        self.before: dict[str, Sight] = {}
        self.now: dict[str, Sight] = {}

    def begin(self) -> None:
        """Of a capture."""
        self.before, self.now = self.now, {}

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
