"""Buffers of host memory, each for one subgroup, as float32 tensors.

Invariants: the memory is mapped once, at construction, and nothing grows. Each buffer begins on a
page, so that transfers go straight between it and a file. The size is exact.
"""

from __future__ import annotations

import mmap

import torch

from statehold.offload.subgroups import ITEM_BYTES

__all__ = ["Buffers"]


class Buffers:
    """`count` buffers of `nbytes` each."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        # Private: by default, the kernel makes no huge pages of shared memory.
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(count * nbytes, mmap.PAGESIZE), flags=kind)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._items = torch.frombuffer(memory, dtype=torch.float32)  # keeps the memory
        self._each = nbytes // ITEM_BYTES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._items[index * self._each : (index + 1) * self._each]
