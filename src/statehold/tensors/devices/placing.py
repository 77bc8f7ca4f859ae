"""Places on a device: where the bytes of a saved chunk go as they arrive.

Invariants: no memory is set aside for a place. A place takes any run of bytes of its chunk, in any
order; what it does not want of a run is left. An element is in one run only: chunks begin at a
multiple of their element's size in the file (`ChunkPlace.is_aligned`), and runs are cut where
blocks of the checksum grid end.
Not here: which bytes are read (read_plan), buffers, streams and scratch memory (loading).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.tensors.devices.elements import as_moved, flat
from statehold.tensors.storable import is_view_of_other_values, part_of, without_flags


class ChunkPlace(NamedTuple):
    """A place for the elements `wanted` of a dense chunk of `shape` and `dtype`, counted from the
    chunk's first: `target`, which has their shape.

    steps: the strides of the chunk, in elements. [low, high) are its bytes from the first wanted
    element to the last one. is_plain: they are the bytes of the target, in order. `begin`: the byte
    of the chunk where the segment that is read begins.
    """

    target: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    wanted: Box
    steps: tuple[int, ...]
    low: int
    high: int
    is_plain: bool
    begin: int = 0

    @classmethod
    def of(
        cls, target: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], wanted: Box
    ) -> ChunkPlace:
        """The place for `wanted`; its segment begins where the chunk does."""
        steps = tuple([math.prod(shape[dim + 1 :]) for dim in range(len(shape))])
        first = sum(map(operator.mul, wanted.offsets, steps))
        span = 1 + sum([(size - 1) * step for size, step in zip(wanted.shape, steps, strict=True)])
        low, high = first * dtype.itemsize, (first + span) * dtype.itemsize
        is_plain = (
            span == wanted.numel
            and target.dtype == dtype
            and target.is_contiguous()
            and not is_view_of_other_values(target)
        )
        return cls(target, dtype, tuple(shape), wanted, steps, low, high, is_plain)

    def is_aligned(self, begin: int) -> bool:
        """Whether a chunk that begins at this byte of a file has whole elements in every run."""
        return self.is_plain or begin % self.dtype.itemsize == 0

    def bytes_at(self, low: int, nbytes: int) -> torch.Tensor:
        """The memory for the wanted bytes [low, low + nbytes) of the chunk, of a plain place."""
        return flat(self.target, low - self.low, nbytes)

    def take(self, found: torch.Tensor, low: int) -> None:
        """Copy what is wanted of `found`, on the device: the bytes of the chunk from `low` on,
        whole elements, and aligned to them."""
        items, at = found.view(self.dtype), 0
        if (low, low + found.numel()) == (self.low, self.high):
            begin = items.storage_offset()
            _set(self.target, items.as_strided(self.wanted.shape, self.steps, begin))
            return
        begin = low // self.dtype.itemsize
        for box in boxes_of_run(self.shape, begin, begin + items.numel()):
            here = items.narrow(0, at, box.numel).view(box.shape)
            at += box.numel
            if (common := box.intersection(self.wanted)) is not None:
                part = part_of(self.target, common.relative_to(self.wanted))
                _set(part, part_of(here, common.relative_to(box)))


def _set(target: torch.Tensor, values: torch.Tensor) -> None:
    """copy_(), which may take memory for dtypes that it has no kernel for, and for flags."""
    if target.dtype != values.dtype:
        target.copy_(values)
        return
    memory = without_flags(target)
    as_moved(memory).copy_(as_moved(values))
    if target.is_conj():
        memory.conj_physical_()
    if target.is_neg():
        memory.neg_()
