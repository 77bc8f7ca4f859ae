"""The exact sum: the same bits for any number of members, in any order, with or without failures.

Gradients become integers (grid), each member adds those of its microbatches, and the members add
their sums. A report before that tells all members the exponents of all gradients, so all know which
sums there are and what the bases of the next step are (report).

Invariants: what `reduce` computes is a function of the bases and of the set of gradients. The bases
change in `finish` only, to a function of that set.
What is not finite: if any element of the gradient that a microbatch gives to a tensor is NaN or
infinite, the whole mean gradient of that tensor is NaN on all members. So a GradScaler skips the
step on all of them.
Memory: 8 bytes for each element that has a gradient, as much for each copy, and two buckets. In a
step in which a tensor has gradients with n limits, it takes 8 * n bytes for each element. p.grad is
None while the members reduce, so the means take the place of the gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statehold.errors import InvariantError, StateMismatchError
from statehold.resilience.sums.grid import LEAST, Grid, exponent_of
from statehold.resilience.sums.interface import Pending, Start
from statehold.resilience.sums.pieces import Temporaries, piece_of, slices
from statehold.resilience.sums.report import Report, fingerprint_of
from statehold.resilience.sums.sites import Site, sites_of
from statehold.tensors.storable import local_of

# Marks of a report. An exponent has the mark _ZERO + exponent, which is 2 or more.
_NOT_FINITE = 1
_ZERO = 2 - LEAST


class ExactSum:
    """Sums named parameters' gradients exactly. See interface.Sum."""

    def __init__(self, params: Iterable[tuple[str, Tensor]], microbatches: int) -> None:
        self._sites = sites_of(params)
        self._grid = Grid(microbatches)
        self._integers = Integers(self._sites, self._grid)
        self._copies: dict[int, tuple[Integers, Report]] = {}
        self._copy = 0
        self._has_added = False  # something of the pass that was announced last
        self._transit = Transit(self._sites, self._grid, self._integers)
        self._bases = [LEAST] * len(self._sites)
        self._report = self._empty_report()
        self._reduced: _Reduced | None = None
        self.finished = self._report

    def _empty_report(self) -> Report:
        return Report(self._grid.microbatches, len(self._sites))

    def begin(self) -> None:
        self._integers.clear()
        self._report = self._empty_report()
        for copy, (integers, _) in self._copies.items():
            integers.clear()
            self._copies[copy] = integers, self._empty_report()
        self._copy = 0
        self._reduced = None
        for site in self._sites:
            site.give(None)

    def watch(self, start: Start | None, copy: int = 0) -> None:
        """Integers are reduced after the last pass."""
        self._copy = copy
        self._has_added = False

    def count(self, index: int, loss: Tensor | None) -> None:
        integers, report = self._part(self._copy)
        self._copy = 0
        report.check(index)
        found = ((number, site.take()) for number, site in enumerate(self._sites))
        grads = {number: grad for number, grad in found if grad is not None}
        marks = [0] * len(self._sites)
        for number, largest in zip(grads, _largest(list(grads.values())), strict=True):
            is_finite = 0 <= largest < math.inf
            marks[number] = _ZERO + exponent_of(largest) if is_finite else _NOT_FINITE
        self._has_added = True
        for number, grad in grads.items():
            if marks[number] != _NOT_FINITE:
                integers.add(number, self._limit(number, marks[number]), grad)
            self._sites[number].give(None)
        value = None if loss is None else local_of(loss.detach()).item()
        report.count(index, value, marks)

    def stray(self) -> str | None:
        return next((site.name for site in self._sites if site.param.grad is not None), None)

    def abandon(self) -> bool:
        """Integers of earlier passes are safe, unless some of this one have come to them."""
        if self._has_added:
            self.begin()
            return False
        self._copy = 0
        for site in self._sites:
            site.give(None)
        return True

    def _part(self, copy: int) -> tuple[Integers, Report]:
        if copy == 0:
            return self._integers, self._report
        if copy not in self._copies:
            self._copies[copy] = Integers(self._sites, self._grid), self._empty_report()
        return self._copies[copy]

    def adopt(self, copy: int) -> None:
        integers, report = self._part(copy)
        self._integers.merge(integers)
        self._report.add(report)

    def _limit(self, number: int, mark: int) -> int:
        return self._grid.limit(mark - _ZERO, self._bases[number])

    def reduce(self, start: Start) -> None:
        self._reduced = None
        facts = [(each.name, each.numel, each.dtype) for each in self._sites], self._bases
        device = self._sites[0].device if self._sites else torch.device("cpu")
        report = self._report.reduced(start, device, fingerprint_of(facts))
        marks = [set(column) - {0} for column in report.marks.t().tolist()]
        limits = {
            number: tuple(sorted({self._limit(number, mark) for mark in own}))
            for number, own in enumerate(marks)
            if own and _NOT_FINITE not in own
        }
        means = self._transit.means(limits, start)
        for number, own in enumerate(marks):
            if _NOT_FINITE in own:
                site = self._sites[number]
                means[number] = torch.full(
                    (site.numel,), math.nan, dtype=site.dtype, device=site.device
                )
        self._reduced = _Reduced(report, means, [max(own, default=0) for own in marks])

    def finish(self) -> None:
        if self._reduced is None:
            raise InvariantError("a step ends that was not reduced")
        for number, site in enumerate(self._sites):
            site.give(self._reduced.means.get(number))
        for number, mark in enumerate(self._reduced.largest):
            if mark > _NOT_FINITE:
                self._bases[number] = self._grid.base_after(mark - _ZERO)
        self.finished = self._reduced.report
        self._reduced = None
        self._integers.clear()

    @property
    def announced_bytes(self) -> int:
        copies = sum(integers.held_bytes for integers, _ in self._copies.values())
        return self._integers.held_bytes + copies + self._transit.held_bytes

    def state_dict(self) -> dict[str, Any]:
        """The base of every tensor."""
        return {"bases": torch.tensor(self._bases, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        bases = state["bases"].tolist() if "bases" in state else [LEAST] * len(self._sites)
        if len(bases) != len(self._sites):
            raise StateMismatchError(
                "the bases of exact sums are of another model",
                facts={"expected": f"{len(self._sites)} tensors", "got": len(bases)},
            )
        self._bases = bases


@dataclass(frozen=True, slots=True)
class _Reduced:
    """A result that `finish` commits.

    means: of the tensors that have a gradient. largest: of the marks of each tensor.
    """

    report: Report
    means: dict[int, Tensor]
    largest: list[int]


def _largest(grads: Sequence[Tensor]) -> list[float]:
    """The largest magnitude in each flat gradient; NaN if it has NaN."""
    found = [
        torch.stack(torch.aminmax(grad)).double().abs().amax()
        if grad.numel()
        else grad.new_zeros((), dtype=torch.float64)
        for grad in grads
    ]
    return [] if not found else torch.stack([each.to(found[0].device) for each in found]).tolist()


# -- integers on their way -------------------------------------------------------------------------
# The integers of all members are added bucket by bucket: from the sums through scratch to the
# means. The work is cut into units: a piece of one tensor, with all of its sums. A bucket is a run
# of units. Its integers are copied into scratch and reduced there. Meanwhile the bucket before it
# becomes gradients.
#
# The sums stay as they are. The cut depends on the limits and on the sizes of the tensors only, so
# it is alike on all members. Scratch that an operation was given and that has not come back is
# dropped: the operation may still write there.

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


# -- the integers of one member --------------------------------------------------------------------
# For each tensor a sum, or several with different limits (grid). A sum is changed by `add` only.
# Memory is kept for one sum of each tensor that ever had one, and reused by later steps.


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
