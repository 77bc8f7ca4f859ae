"""The integers of one member: for each tensor a sum, or several with different limits (grid).

Invariants: a sum is changed by `add` only. Memory is kept for one sum of each tensor that ever had
one, and reused by later steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from statehold.resilience.sums.grid import Grid
from statehold.resilience.sums.pieces import Temporaries, slices
from statehold.resilience.sums.sites import Site


class Integers:
    """Sums of gradients as multiples of 2**(limit - bits)."""

    def __init__(self, sites: Sequence[Site], grid: Grid) -> None:
        self._sites = sites
        self._grid = grid
        self._sums: dict[tuple[int, int], Tensor] = {}
        self._idle: dict[int, Tensor] = {}
        self._temporaries = Temporaries()

    def clear(self) -> None:
        """Drop all sums."""
        for (number, _), total in self._sums.items():
            self._idle[number] = total
        self._sums.clear()

    def of(self, number: int, limit: int) -> Tensor | None:
        """The sum of a tensor; None if this member has added nothing to it."""
        return self._sums.get((number, limit))

    def add(self, number: int, limit: int, grad: Tensor) -> None:
        """Add a flat gradient whose elements are below 2**limit."""
        total = self._sums.get((number, limit))
        if is_first := total is None:
            total = self._memory(number)
        scale = self._grid.scale(limit)
        dtype = torch.promote_types(grad.dtype, torch.float32)
        for part in slices(total):
            length = part.stop - part.start
            scaled = self._temporaries.of(grad.device, dtype, length)
            scaled.copy_(grad[part]).mul_(scale).round_()
            if is_first:
                total[part].copy_(scaled)
            else:
                integers = self._temporaries.of(grad.device, torch.int64, length)
                total[part].add_(integers.copy_(scaled))
        self._sums[number, limit] = total

    def merge(self, other: Integers) -> None:
        """Add all sums of another one, and clear it."""
        for (number, limit), total in other._sums.items():
            own = self._sums.get((number, limit))
            if own is None:
                self._sums[number, limit] = self._memory(number).copy_(total)
            else:
                own.add_(total)
        other.clear()

    def _memory(self, number: int) -> Tensor:
        if number in self._idle:
            return self._idle.pop(number)
        site = self._sites[number]
        return torch.empty(site.numel, dtype=torch.int64, device=site.device)

    @property
    def held_bytes(self) -> int:
        """The memory of all sums, also of those that are kept for later steps."""
        return sum(each.nbytes for each in [*self._sums.values(), *self._idle.values()])
