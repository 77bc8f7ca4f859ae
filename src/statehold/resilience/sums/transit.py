"""Integers of all members, added bucket by bucket: from the sums through scratch to the means.

The work is cut into units: a piece of one tensor, with all of its sums. A bucket is a run of units.
Its integers are copied into scratch and reduced there. Meanwhile the bucket before it becomes
gradients.

Invariants: the sums stay as they are. The cut depends on the limits and on the sizes of the tensors
only, so it is alike on all members. Scratch that an operation was given and that has not come back
is dropped: the operation may still write there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from statehold.resilience.sums.grid import Grid
from statehold.resilience.sums.integers import Integers
from statehold.resilience.sums.interface import Pending, Start
from statehold.resilience.sums.pieces import Temporaries, piece_of
from statehold.resilience.sums.sites import Site

BUCKET_BYTES = 25 << 20
IN_FLIGHT = 2
_NUMEL_LEAST = 1024  # of a bucket: there is room for all sums of an element


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a tensor, and the limits of its sums, the least one first."""

    number: int
    begin: int
    end: int
    limits: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def part(self) -> slice:
        return slice(self.begin, self.end)


@dataclass(slots=True)
class Flight:
    """A bucket that is being reduced, at the beginning of its scratch."""

    units: list[Unit]
    scratch: Tensor
    pending: Pending


class Transit:
    """Reduces integers, and makes means of them."""

    def __init__(self, sites: Sequence[Site], grid: Grid, integers: Integers) -> None:
        self._sites = sites
        self._grid = grid
        self._integers = integers
        self._temporaries = Temporaries()
        self._idle: list[Tensor] = []
        numel = sum(site.numel for site in sites)
        self._capacity = min(BUCKET_BYTES // 8, max(numel, _NUMEL_LEAST))

    def means(self, limits: Mapping[int, tuple[int, ...]], start: Start) -> dict[int, Tensor]:
        """The mean gradients of the tensors, flat, by the limits of the sums that members have."""
        found: dict[int, Tensor] = {}
        flights: deque[Flight] = deque()
        for units in self._buckets(limits):
            if len(flights) == IN_FLIGHT:
                self._land(flights.popleft(), found)
            scratch = self._scratch(self._sites[units[0].number].device)
            flights.append(Flight(units, scratch, start(self._filled(units, scratch))))
        while flights:
            self._land(flights.popleft(), found)
        return found

    def _buckets(self, limits: Mapping[int, tuple[int, ...]]) -> Iterator[list[Unit]]:
        bucket: list[Unit] = []
        room = self._capacity
        for unit in self._units(limits):
            device = self._sites[unit.number].device
            needed = unit.length * len(unit.limits)
            if bucket and (needed > room or device != self._sites[bucket[0].number].device):
                yield bucket
                bucket, room = [], self._capacity
            bucket.append(unit)
            room -= needed
        if bucket:
            yield bucket

    def _units(self, limits: Mapping[int, tuple[int, ...]]) -> Iterator[Unit]:
        for number, own in limits.items():
            site = self._sites[number]
            length = min(piece_of(site.device), self._capacity // len(own))
            for begin in range(0, site.numel, length):
                yield Unit(number, begin, min(begin + length, site.numel), own)

    def _filled(self, units: Sequence[Unit], scratch: Tensor) -> Tensor:
        begin = 0
        for unit in units:
            for limit in unit.limits:
                into = scratch[begin : begin + unit.length]
                own = self._integers.of(unit.number, limit)
                if own is None:
                    into.zero_()
                else:
                    into.copy_(own[unit.part])
                begin += unit.length
        return scratch[:begin]

    def _scratch(self, device: torch.device) -> Tensor:
        for position, idle in enumerate(self._idle):
            if idle.device == device:
                return self._idle.pop(position)
        return torch.empty(self._capacity, dtype=torch.int64, device=device)

    def _land(self, flight: Flight, found: dict[int, Tensor]) -> None:
        flight.pending.wait()
        begin = 0
        for unit in flight.units:
            site = self._sites[unit.number]
            if unit.number not in found:
                found[unit.number] = torch.empty(site.numel, dtype=site.dtype, device=site.device)
            end = begin + unit.length * len(unit.limits)
            rows = flight.scratch[begin:end].view(len(unit.limits), unit.length)
            found[unit.number][unit.part].copy_(self._mean(rows, unit.limits))
            begin = end
        self._idle.append(flight.scratch)

    def _mean(self, rows: Tensor, limits: Sequence[int]) -> Tensor:
        parts = map(self._float64, rows, limits)
        total = next(parts)
        if len(limits) > 1:
            total = total.clone()  # the next part takes its memory
            for part in parts:
                total += part
        return total

    def _float64(self, row: Tensor, limit: int) -> Tensor:
        found = self._temporaries.of(row.device, torch.float64, len(row))
        return found.copy_(row).mul_(self._grid.factor(limit))

    @property
    def held_bytes(self) -> int:
        """The memory of scratch at most, if nothing fails."""
        return IN_FLIGHT * 8 * self._capacity
