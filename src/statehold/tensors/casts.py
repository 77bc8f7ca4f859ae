"""Tensors of a step that are converted to the dtype of the live ones: floats of 8 to 64 bits.

Invariants: a tensor is read in its saved dtype, a block of bounded size at a time, and converted
only after the bytes of the block were verified. The state of a parameter that is converted is made
in the dtype of the parameter, as torch's load_state_dict() has it.
Not here: which tensors these are (destinations), the reading (the caller's `fill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from statehold.format.saved import SavedStep
from statehold.layout.layout import Box
from statehold.tensors import dtypes
from statehold.tensors.stored import Fill, Wanted
from statehold.units import MiB

BLOCK_BYTES = 64 * MiB
# Not float8_e8m0fnu and float4_e2m1fn_x2: they mean nothing without the scales of their block.
_FLOATS = {
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip


def can_cast(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether values of one dtype may be asked for in the other."""
    return one == other or {one, other} <= _FLOATS


class _Cast(NamedTuple):
    """A tensor, its box, its saved dtype, and the live memory of a part of the box."""

    name: str
    box: Box
    saved: torch.dtype
    part: Callable[[Box], torch.Tensor]


class Casts:
    """The conversions of one restore. names: the names of parameters, by their ids."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._found: list[_Cast] = []

    @property
    def names(self) -> list[str]:
        """Of the saved tensors that are converted."""
        return list(dict.fromkeys(each.name for each in self._found))

    def add(
        self, name: str, box: Box, saved: torch.dtype, part: Callable[[Box], torch.Tensor]
    ) -> None:
        """part: the live memory that takes a part of `box`."""
        self._found.append(_Cast(name, box, saved, part))

    def dtype_beside(
        self, parameter: torch.Tensor, dtype: torch.dtype, saved: SavedStep
    ) -> torch.dtype:
        """The dtype of a new state tensor that was saved as `dtype`, beside its parameter."""
        own = saved.tensors.get(self._names.get(id(parameter), ""))
        if own is None or not can_cast(dtype, parameter.dtype):
            return dtype
        is_cast = dtypes.dtype_of(own.dtype, own.name) != parameter.dtype
        return parameter.dtype if is_cast else dtype

    def fill(self, fill: Fill) -> None:
        """Read and convert all of them."""
        batch: list[tuple[torch.Tensor, Wanted]] = []
        size = 0
        for name, whole, dtype, part in self._found:
            for box in _blocks(whole, BLOCK_BYTES // dtype.itemsize):
                memory = torch.empty(box.shape, dtype=dtype, device="cpu")
                if size and size + memory.nbytes > BLOCK_BYTES:
                    _convert(batch, fill)
                    batch, size = [], 0
                batch.append((part(box), Wanted(name, box, memory)))
                size += memory.nbytes
        _convert(batch, fill)


def _convert(batch: list[tuple[torch.Tensor, Wanted]], fill: Fill) -> None:
    fill([wanted for _, wanted in batch])
    with torch.no_grad():
        for target, wanted in batch:
            target.copy_(wanted.memory)


def _blocks(box: Box, most: int) -> Iterator[Box]:
    """A box in parts of at most `most` elements, cut along its first dimensions."""
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    if dim is None or box.numel <= most:
        yield box
        return
    half = box.shape[dim] // 2
    for begin, size in ((0, half), (half, box.shape[dim] - half)):
        offsets = [*box.offsets]
        offsets[dim] += begin
        shape = (*box.shape[:dim], size, *box.shape[dim + 1 :])
        yield from _blocks(Box(tuple(offsets), shape), most)
