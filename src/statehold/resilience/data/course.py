"""Which samples each microbatch has: a pure function of (step, index), for the whole training.

Microbatch `index` of `step` has the positions from (step * microbatches + index) * batch on. A
position is counted over all epochs, and each epoch has an order of its own. A batch may so begin
in one epoch and end in the next one: no sample is left out, and each epoch has each sample once.

Invariants: nothing here depends on the replicas, or on what was drawn before. So a replica that
takes over a microbatch draws the same samples, and a restart on other replicas goes on where the
steps ended.
Not here: who computes a microbatch (protocol), and its random numbers (seeding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from statehold.options.keywords import check_number
from statehold.resilience.data.derivation import SEED_MAX, words

# -- the order of the samples in an epoch ----------------------------------------------------------
# It is a bijection that is computed and never stored.
# The numbers lie on a grid that is at most one column larger than needed. A round moves each number
# on by a key, then moves it inside its column by a hash of the column, then exchanges the roles of
# rows and columns. A result outside of the range goes through the rounds again until it is inside
# (cycle walking), which leaves a bijection. The number of rows is even, because with an odd number
# every round would be an even permutation, and half of all orders could not occur.
# It follows from (size, seed, epoch) alone, and never changes: see derivation. It takes
# microseconds per number. Pure Python is fast enough beside reading a sample, and gives the same
# integers everywhere.

SIZE_MAX = 2**63

# With 8 rounds all orders of 7 samples are equally likely, as far as a chi-square test can see.
ROUNDS = 8
_MASK = 2**64 - 1


class Permutation:
    """A bijection on range(size)."""

    __slots__ = ("_columns", "_keys", "_rows", "_size")

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        rows = math.isqrt(size - 1) + 1
        self._size = size
        self._rows = rows + rows % 2
        self._columns = -(-size // self._rows)
        self._keys = words("permutation", seed, epoch, count=ROUNDS)

    def __call__(self, number: int) -> int:
        size, rows, columns = self._size, self._rows, self._columns
        grid = rows * columns
        while True:
            for key in self._keys:
                column, row = divmod((number + key) % grid, rows)
                number = (row + _mixed(column + key)) % rows * columns + column
            if number < size:
                return number


def _mixed(word: int) -> int:
    """A bijection on words of 64 bits that changes about half of the bits for each changed one:
    the finalizer of SplitMix64."""
    word &= _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31


# -- the samples of a microbatch -------------------------------------------------------------------

BATCH_MAX = 2**31
MICROBATCHES_MAX = 2**31
STEP_MAX = 2**63


@dataclass(frozen=True, slots=True)
class Course:
    """The samples of all microbatches of a training.

    size: how many samples the data set has.
    batch: how many samples a microbatch has.
    microbatches: how many microbatches a step has.
    seed: another seed gives other orders.
    """

    size: int
    batch: int
    microbatches: int
    seed: int

    def __post_init__(self) -> None:
        check_number("the number of samples", self.size, 1, SIZE_MAX)
        check_number("batch", self.batch, 1, BATCH_MAX)
        check_number("microbatches", self.microbatches, 1, MICROBATCHES_MAX)
        check_number("seed", self.seed, 0, SEED_MAX)

    @property
    def facts(self) -> dict[str, int]:
        """What all replicas have alike, and a run keeps, by the names that a user knows."""
        return {
            "samples": self.size,
            "batch": self.batch,
            "microbatches": self.microbatches,
            "seed": self.seed,
        }

    def samples(self, step: int, index: int) -> list[int]:
        """The numbers of the samples of a microbatch, each in range(size), in order."""
        self.check(step, index)
        begin = (step * self.microbatches + index) * self.batch
        end = begin + self.batch
        found: list[int] = []
        while begin < end:
            epoch, first = divmod(begin, self.size)
            stop = min(end - epoch * self.size, self.size)
            found += map(Permutation(self.size, self.seed, epoch), range(first, stop))
            begin += stop - first
        return found

    def check(self, step: int, index: int) -> None:
        """Raise a UsageError unless (step, index) names a microbatch."""
        check_number("step", step, 0, STEP_MAX)
        check_number("the index of a microbatch", index, 0, self.microbatches - 1)
