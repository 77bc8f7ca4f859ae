"""Drawing one microbatch: its samples from the data set, made into a batch, with a checksum.

Invariants: the batch is a function of (step, index), in every process, if the data set keeps to
numbers of samples and to the global generators, which are seeded here.
Not here: in which process it happens (workers), and when (loader).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statehold.resilience.data.checksums import checksum
from statehold.resilience.data.course import Course
from statehold.resilience.data.seeding import DRAWING, seed_microbatch


@dataclass(frozen=True, slots=True)
class Drawn:
    batch: Any
    checksum: int


@dataclass(frozen=True, slots=True)
class Draw:
    """What every process needs for drawing."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    course: Course

    def __call__(self, step: int, index: int) -> Drawn:
        samples = self.course.samples(step, index)
        seed_microbatch(self.course.seed, step, index, DRAWING)
        batch = self.collate_fn(self._fetched(samples))
        return Drawn(batch, checksum(batch))

    def _fetched(self, samples: list[int]) -> list[Any]:
        # As torch's DataLoader does: a data set may read several samples at once.
        if (several := getattr(self.dataset, "__getitems__", None)) is not None:
            return list(several(samples))
        return [self.dataset[sample] for sample in samples]
