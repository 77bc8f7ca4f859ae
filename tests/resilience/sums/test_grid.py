"""Grid: every gradient has one limit, which fits it; sums of integers cannot overflow."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from statehold.resilience.sums.grid import LEAST, SPACING, Grid, exponent_of


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_an_exponent_is_the_least_one(largest: float) -> None:
    exponent = exponent_of(largest)
    assert abs(Fraction(largest)) < Fraction(2) ** exponent
    assert exponent == LEAST or abs(Fraction(largest)) >= Fraction(2) ** (exponent - 1)


@given(st.integers(LEAST, 1024), st.integers(LEAST, 1036), st.integers(1, 2**31))
def test_limits(exponent: int, base: int, microbatches: int) -> None:
    grid = Grid(microbatches)
    limit = grid.limit(exponent, base)
    assert exponent <= limit
    assert limit == base or limit < exponent + SPACING
    assert (limit - base) % SPACING == 0
    assert microbatches * 2**grid.bits < 2**63
    assert grid.scale(limit) == Fraction(2) ** (grid.bits - limit)
    assert math.isclose(grid.factor(limit) * grid.scale(limit) * microbatches, 1)


@given(st.integers(LEAST, 128), st.integers(1, 2**31))
def test_scales_are_numbers_of_float32(exponent: int, microbatches: int) -> None:
    grid = Grid(microbatches)
    for base in (LEAST, grid.base_after(exponent)):
        scale = grid.scale(grid.limit(exponent, base))
        assert 2.0**-126 <= scale <= 2.0**127
