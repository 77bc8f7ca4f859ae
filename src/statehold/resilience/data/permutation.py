"""The order of the samples in an epoch: a bijection that is computed and never stored.

The numbers lie on a grid that is at most one column larger than needed. A round moves each number
on by a key, then moves it inside its column by a hash of the column, then exchanges the roles of
rows and columns. A result outside of the range goes through the rounds again until it is inside
(cycle walking), which leaves a bijection. The number of rows is even, because with an odd number
every round would be an even permutation, and half of all orders could not occur.

Invariants: the order is a function of (size, seed, epoch), and never changes: see derivation.
It takes microseconds per number. Pure Python is fast enough beside reading a sample, and gives
the same integers everywhere.
Not here: which numbers a microbatch has (course).
"""

from __future__ import annotations

import math

from statehold.resilience.data.derivation import words

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
