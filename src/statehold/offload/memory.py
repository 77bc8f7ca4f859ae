"""Buffers of host memory, each for one subgroup, as float32 tensors.

Invariants: the memory is mapped once, at construction, and nothing grows. Each buffer begins on a
page, so that transfers go straight between it and a file. The size is exact.
"""

from __future__ import annotations

import torch

from statehold.offload.subgroups import ITEM_BYTES
from statehold.tensors.devices.pinning import mapped


class Buffers:
    """`count` buffers of `nbytes` each."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self._items = mapped(count * nbytes).view(torch.float32)
        self._each = nbytes // ITEM_BYTES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._items[index * self._each : (index + 1) * self._each]
