"""Landing: memory on a device beside its place, for a box that the engine cannot put there itself.

The engine hands device memory over as runs of bytes of a chunk. Where a tensor takes only a box of
the chunk, the runs are collected here, and `land` moves the box into the tensor, on the device.
Holds: `land` is called when every run has arrived and was verified. The extra memory is that
between the first and the last byte that is read of the chunk.
"""

from __future__ import annotations

import math

import torch

from statehold.planning.layout import Box


class Landing:
    """The bytes [begin, end) of a dense chunk of `shape`, for the box `wanted` of it, which goes to
    `place`."""

    def __init__(
        self, place: torch.Tensor, wanted: Box, shape: tuple[int, ...], begin: int, end: int
    ) -> None:
        self._place = place
        self._wanted = wanted
        self._shape = shape
        self._begin = begin
        self._bytes = torch.empty(end - begin, dtype=torch.uint8, device=place.device)

    def part(self, begin: int, end: int) -> torch.Tensor:
        """Where the bytes [begin, end) of the chunk arrive."""
        return self._bytes[begin - self._begin : end - self._begin]

    def land(self) -> None:
        """Move the box to its place."""
        steps = [math.prod(self._shape[dim + 1 :]) for dim in range(len(self._shape))]
        first = sum(map(math.prod, zip(self._wanted.offsets, steps, strict=True)))
        items = self._bytes.view(self._place.dtype)
        skipped = self._begin // self._place.element_size()
        box = items.as_strided(self._wanted.shape, steps, first - skipped)
        self._place.copy_(box)
