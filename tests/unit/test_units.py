"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest

from statehold.errors import UsageError
from statehold.units import GiB, KiB, MiB, TiB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (12345, 12345),
        ("0", 0),
        ("512", 512),
        ("512 B", 512),
        ("1KiB", KiB),
        (" 16 MiB ", 16 * MiB),
        ("1.5GiB", GiB + 512 * MiB),
        ("2 tib", 2 * TiB),
        ("1kB", 1000),
        ("2.5 GB", 2_500_000_000),
        ("0.001 TB", 10**9),
    ],
)
def test_parse(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "1G", "-1", "1.B", "0.3 B", "1e3", "1,5 GiB", "\u0661 GiB", "1_000", -1, True, 1.5],
)
def test_refused(value: int | str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(value)
    assert {"expected", "got"} <= set(caught.value.facts)
    assert "512 MiB" in str(caught.value)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (MiB - 1, "1 MiB"),
        (1000 * KiB, "0.98 MiB"),
        (4_870_000_000, "4.54 GiB"),
        (5000 * TiB, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_format_bytes(n: int, expected: str) -> None:
    assert format_bytes(n) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.0000123, "12.3 us"),
        (0.01234, "12.3 ms"),
        (0.9999, "1 s"),
        (4.561, "4.56 s"),
        (59.97, "1 min 00 s"),
        (125.4, "2 min 05 s"),
        (12_000, "3 h 20 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_format_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected
