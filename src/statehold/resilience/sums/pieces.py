"""Elementwise work on long tensors, in pieces for which temporaries stay in the processor's cache.

Invariants: the size of a piece depends on the kind of device only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ON_CPU = 1 << 15  # elements: three temporaries of 8 bytes each fit into a cache of 1 MB
_ON_DEVICE = 1 << 22  # a device is slow to begin


def piece_of(device: torch.device) -> int:
    """The elements of a piece."""
    return _ON_CPU if device.type == "cpu" else _ON_DEVICE


def slices(tensor: Tensor) -> Iterator[slice]:
    """Slices of a flat tensor, one for each of its pieces."""
    length = piece_of(tensor.device)
    for begin in range(0, tensor.numel(), length):
        yield slice(begin, min(begin + length, tensor.numel()))


class Temporaries:
    """Uninitialised tensors of the length of a piece, by device and dtype, that are kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def of(self, device: torch.device, dtype: torch.dtype, length: int) -> Tensor:
        """One of `length` elements; the same memory each time."""
        key = device, dtype
        if key not in self._kept:
            self._kept[key] = torch.empty(piece_of(device), dtype=dtype, device=device)
        return self._kept[key][:length]
