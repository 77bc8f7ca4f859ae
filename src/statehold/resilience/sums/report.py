"""What the members tell each other about a step before or after they sum its gradients: losses,
and a mark for each gradient that a microbatch gave.

A report is one vector of int64 with a slot for each microbatch. The member that has computed the
microbatch fills its slot, all others leave zeros there, so the sum of the reports of all members
has every slot as it was filled. It is exact whatever the slots mean.

    [members, fingerprint, flags, losses: bits of a float64 each, marks: four int16 in each int64]

Invariants: marks are 0 (no gradient) to 2**15 - 1, so no slot carries into the next one. A reduced
report has come from members with one fingerprint.
Not here: what marks and flags mean (exact, fast).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from statehold.errors import InvariantError, UsageError
from statehold.resilience.sums.interface import Start

_HEAD = 2


class UnlikeError(InvariantError):
    """The members cannot sum: their parameters, or the states of their sums, differ."""


_FINGERPRINT_BITS = 40  # the sum over members is below 2**63


class Report:
    """The report of one member, or, once reduced, of all of them."""

    def __init__(self, microbatches: int, tensors: int, flags: int = 0) -> None:
        self.microbatches = microbatches
        self.tensors = tensors
        self._flags = slice(_HEAD, _HEAD + flags)
        self._losses = slice(self._flags.stop, self._flags.stop + microbatches)
        marks = -(-microbatches * tensors // 4)
        self._vector = torch.zeros(self._losses.stop + marks, dtype=torch.int64, device="cpu")
        self._counted: set[int] = set()

    def count(self, index: int, loss: Tensor | float | None, marks: Sequence[int]) -> None:
        """Fill the slot of a microbatch."""
        self.check(index)
        self._counted.add(index)
        self._losses_of(self._vector)[index] = math.nan if loss is None else float(loss)
        self.marks[index] = torch.tensor(marks, dtype=torch.int16, device="cpu")

    @property
    def counted(self) -> int:
        """How many microbatches this member has counted."""
        return len(self._counted)

    def add(self, other: Report) -> None:
        """Take over the slots that another report of this member has filled."""
        for index in other._counted:
            self.check(index)
        self._counted |= other._counted
        self._vector[_HEAD:] += other._vector[_HEAD:]

    def check(self, index: int) -> None:
        """Raise unless microbatch `index` can be counted."""
        if not 0 <= index < self.microbatches:
            raise UsageError(
                "there is no such microbatch",
                facts={"expected": f"0 to {self.microbatches - 1}", "got": index},
            )
        if index in self._counted:
            raise InvariantError("a microbatch was counted twice", facts={"microbatch": index})

    def reduced(self, start: Start, device: torch.device, fingerprint: int) -> Report:
        """The report of all members. `fingerprint` has to be alike on all of them."""
        self._vector[:_HEAD] = torch.tensor([1, fingerprint], device="cpu")
        scratch = self._vector.to(device, copy=True)
        start(scratch).wait()
        found = Report(self.microbatches, self.tensors, self._flags.stop - self._flags.start)
        found._vector = scratch.cpu()
        members, fingerprints = found._vector[:_HEAD].tolist()
        if fingerprints != members * fingerprint:
            raise UnlikeError(
                "the members differ in their parameters, or in the state of their sums",
                facts={"members": members, "own fingerprint": fingerprint},
            )
        return found

    @property
    def flags(self) -> Tensor:
        """Integers that are added over the members; a view."""
        return self._vector[self._flags]

    @property
    def marks(self) -> Tensor:
        """By microbatch and tensor; a view."""
        marks = self._vector[self._losses.stop :].view(torch.int16)
        return marks[: self.microbatches * self.tensors].view(self.microbatches, self.tensors)

    @property
    def losses(self) -> list[float]:
        """By microbatch; NaN for one without."""
        found: list[float] = self._losses_of(self._vector).tolist()
        return found

    @property
    def mean_loss(self) -> float:
        losses = self.losses
        is_finite = all(map(math.isfinite, losses))
        return (math.fsum(losses) if is_finite else sum(losses)) / self.microbatches

    def _losses_of(self, vector: Tensor) -> Tensor:
        return vector[self._losses].view(torch.float64)


def fingerprint_of(facts: object) -> int:
    """A number that differs where the text of `facts` differs."""
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return int.from_bytes(digest, "little") % (1 << _FINGERPRINT_BITS)
