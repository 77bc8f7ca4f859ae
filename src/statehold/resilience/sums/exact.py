"""The exact sum: the same bits for any number of members, in any order, with or without failures.

Gradients become integers (grid), each member adds those of its microbatches (integers), and the
members add their sums (transit). A report before that tells all members the exponents of all
gradients, so all know which sums there are and what the bases of the next step are (report).

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statehold.errors import InvariantError, StateMismatchError
from statehold.resilience.sums.grid import LEAST, Grid, exponent_of
from statehold.resilience.sums.integers import Integers
from statehold.resilience.sums.interface import Start
from statehold.resilience.sums.report import Report, fingerprint_of
from statehold.resilience.sums.sites import sites_of
from statehold.resilience.sums.transit import Transit
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
