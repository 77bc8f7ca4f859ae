"""Bytes as numbers without torch: every 8-bit float as torch has it, statistics, distances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from statehold.cli.numbers import Difference, Statistics, bits_of, has_numbers, numbers_of
from statehold.encoding.header import DTYPE_BITS

FLOAT8 = {
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_8_bit_floats(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(FLOAT8[dtype]).to(torch.float32).numpy()
    found = numbers_of(dtype, bits_of(dtype, codes.numpy().tobytes()))
    np.testing.assert_array_equal(found, expected)


def test_bfloat16() -> None:
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    expected = codes.view(torch.bfloat16).to(torch.float32).numpy()
    found = numbers_of("BF16", bits_of("BF16", codes.numpy().tobytes()))
    np.testing.assert_array_equal(found, expected)


def test_what_has_numbers() -> None:
    assert {dtype for dtype in DTYPE_BITS if not has_numbers(dtype)} == {"F4", "F6_E2M3", "F6_E3M2"}


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    values = np.random.default_rng(1).normal(5, 3, 1000).astype("<f4")
    values[::100] = 0
    values[3], values[501], values[502] = np.nan, np.inf, -np.inf
    found = Statistics()
    for part in np.array_split(values, 7):
        found.add(part)
    finite = values[np.isfinite(values)].astype("f8")
    assert (found.count, found.finite, found.zeros, found.nan, found.inf) == (1000, 997, 10, 1, 2)
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12)
    assert found.std == pytest.approx(finite.std(), rel=1e-12)


def test_statistics_of_other_kinds() -> None:
    flags, whole, nothing = Statistics(), Statistics(), Statistics()
    flags.add(np.array([True, False, True]))
    assert (flags.min, flags.max, flags.zeros) == (0, 1, 1)
    big = 2**63 - 1
    whole.add(np.array([big, -big - 1]))
    assert (whole.min, whole.max) == (-big - 1, big)
    nothing.add(np.zeros(0))
    assert (nothing.count, nothing.min, nothing.mean, nothing.std) == (0, None, None, None)
    magnitudes = Statistics()
    magnitudes.add(np.array([3 + 4j], "<c8"))
    assert magnitudes.max == 5


def difference(dtype: str, a: list[float], b: list[float], kind: str) -> tuple[int, float | None]:
    found = Difference()
    left, right = (np.array(each, kind).tobytes() for each in (a, b))
    found.add(dtype, bits_of(dtype, left), bits_of(dtype, right))
    return found.elements, found.max_abs


def test_differences() -> None:
    nan, inf = math.nan, math.inf
    assert difference("F32", [1, 2, nan], [1, 2.5, nan], "<f4") == (1, 0.5)
    assert difference("F32", [0.0], [-0.0], "<f4") == (1, 0.0)
    assert difference("F32", [inf, 1], [-inf, 2], "<f4") == (2, inf)
    elements, largest = difference("F32", [nan, 1], [1, 9], "<f4")
    assert elements == 2
    assert math.isnan(largest or 0)
    assert difference("I8", [-128], [127], "i1") == (1, 255)
    assert difference("U8", [3], [250], "u1") == (1, 247)
    assert difference("I64", [-(2**63)], [0], "<i8") == (1, 2.0**63)
    assert difference("BOOL", [True, False], [True, True], "?") == (1, 1.0)
    assert difference("F4", [3], [250], "u1") == (1, None)
