"""How gradients become integers: powers of two that depend on no order, and the error of that.

The gradient that one microbatch gives to one tensor is rounded to multiples of a power of two, and
its multiples are added as 64-bit integers. Sums of integers have no rounding, so they have no
order. The power of two follows from two numbers alone, and not from who computes when:

    base       of the tensor: what the step before said, so all members have it
    exponent   of the gradient: all of its elements are below 2**exponent

A tensor has a sum for each limit that occurs in the step, and these are added at the end. So a
gradient that is larger than foreseen costs the memory of one more sum of its tensor. No microbatch
is computed a second time, also not in the first step, where nothing is foreseen.

Invariants: integers are at most 2**bits, and `microbatches` of them are at most 2**62. The error of
a mean has the bound that Grid states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = -64  # no base is lower: scales stay within float32
HEADROOM = 12  # gradients may grow by this factor (2**) until a tensor needs a second sum
SPACING = 20
SUM_BITS = 62


@dataclass(frozen=True, slots=True)
class Grid:
    """The grids of steps with so many microbatches.

    `limit(exponent, base)` is the base, if the exponent is not larger. Otherwise it is the first of
    base + SPACING, base + 2 * SPACING ... that is not smaller than the exponent. The gradient
    becomes multiples of 2**(limit - bits).

    The error. Let `mean` be the exact mean of the gradients that autograd gave, element by element,
    and `largest` the largest magnitude in this tensor in this step or in the one before, but at
    least 2**(LEAST - HEADROOM). Each multiple is off by half of 2**(limit - bits) at most, and the
    mean of them is, too. Every limit that occurs is at most exponent of `largest` + max(HEADROOM,
    SPACING - 1), and 2**exponent is at most 2 * `largest`. The sums become float64 and are
    multiplied and added there, each with a relative error of 2**-53 of at most `largest`, which is
    less than 2**-49 * `largest` for the few sums there are. So the result is off by at most

        2**(SPACING - bits) * largest  +  half of the last place of the gradient's type.

    In the steps where the tensor's gradients stay below 2**HEADROOM times those of the step before,
    it is 2**(HEADROOM + 1 - bits) instead of 2**(SPACING - bits). With 64 microbatches, bits are
    56: an element that is 2**-20 of the largest one has 24 good bits, as many as float32 has.
    """

    microbatches: int

    @property
    def bits(self) -> int:
        return SUM_BITS - (self.microbatches - 1).bit_length()

    def limit(self, exponent: int, base: int) -> int:
        """The limit for a gradient of this exponent."""
        return base + SPACING * max(0, -((base - exponent) // SPACING))

    def base_after(self, exponent: int) -> int:
        """The base of the step after one whose largest gradient has this exponent."""
        return max(LEAST, exponent + HEADROOM)

    def scale(self, limit: int) -> float:
        """What makes a gradient a number of multiples."""
        return math.ldexp(1.0, self.bits - limit)

    def factor(self, limit: int) -> float:
        """What makes a sum of multiples its part of the mean."""
        return math.ldexp(1.0, limit - self.bits) / self.microbatches


def exponent_of(largest: float) -> int:
    """The least integer with abs(largest) < 2**exponent, but at least LEAST."""
    return max(LEAST, math.frexp(largest)[1]) if largest else LEAST
