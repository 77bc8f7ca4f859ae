"""Shares of paths by bandwidth, in turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.planners.placement import (
    Moved,
    averaged,
    bandwidth,
    choose_subgroup_bytes,
    in_turns,
    is_worth_measuring,
    replaced,
    shares,
    slowest_s,
    with_one_on,
)
from statehold.units import MiB

bandwidths = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(st.integers(0, 500), bandwidths)
def test_shares_are_proportional(count: int, rates: list[float]) -> None:
    found = shares(count, rates)
    assert sum(found) == count
    for share, rate in zip(found, rates, strict=True):
        assert abs(share - count * rate / sum(rates)) < 1


def test_largest_remainders_get_the_rest() -> None:
    assert shares(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert shares(3, [2.0, 1.0]) == [2, 1]
    assert shares(7, [5.0, 1.0]) == [6, 1]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_paths_take_turns(counts: list[int]) -> None:
    order = in_turns(counts)
    assert [order.count(path) for path in range(len(counts))] == counts
    for end in range(len(order)):
        for path, count in enumerate(counts):
            fair = end * count / sum(counts)
            assert abs(order[:end].count(path) - fair) < len(counts)


def test_turns_of_two_to_one() -> None:
    assert in_turns([4, 2]) == [0, 1, 0, 0, 1, 0]


@given(st.integers(1, 200), bandwidths)
def test_a_replacement_is_never_slower(count: int, rates: list[float]) -> None:
    before = shares(count, [1.0] * len(rates))
    after = replaced(before, rates)
    assert sum(after) == count
    assert slowest_s(after, rates) <= slowest_s(before, rates)


def test_small_differences_move_nothing() -> None:
    assert replaced([32, 32], [1.0, 1.02]) == [32, 32]
    assert replaced([32, 32], [1.0, 2.0]) == [21, 43]
    assert replaced([], []) == []


def test_subgroups_are_neither_tiny_nor_huge() -> None:
    assert choose_subgroup_bytes(1000) == 4 * MiB
    assert choose_subgroup_bytes(6400 * MiB) == 50 * MiB
    assert choose_subgroup_bytes(1 << 50) == 128 * MiB


@given(st.floats(1, 100), st.floats(1, 100), st.integers(1, 10**12))
def test_half_and_full_duplex_need_no_telling_apart(read: float, write: float, size: int) -> None:
    half = Moved(size, size, size / read + size / write)
    full = Moved(size, size, max(size / read, size / write))
    assert bandwidth(half) == pytest.approx(1 / (1 / read + 1 / write))
    assert bandwidth(full) == pytest.approx(min(read, write))


def test_only_what_was_read_and_written_alike_says_a_bandwidth() -> None:
    assert bandwidth(Moved(0, 100, 1.0)) is None
    assert bandwidth(Moved(100, 0, 1.0)) is None
    assert bandwidth(Moved(49, 100, 1.0)) is None
    assert bandwidth(Moved(50, 100, 1.0)) == 75.0
    assert bandwidth(Moved()) is None
    assert Moved(5, 7, 2.0) - Moved(1, 2, 0.5) == Moved(4, 5, 1.5)
    assert averaged(None, 8.0) == 8.0
    assert averaged(4.0, 8.0) == 6.0


def test_a_path_that_gets_slower_gets_less() -> None:
    """Another job loads the second of two equal paths, and ends again."""
    counts, rates = [32, 32], [100.0, 100.0]
    seen = []
    for late in [50.0] * 6 + [100.0] * 6:
        rates[1] = averaged(rates[1], late)
        counts = replaced(counts, rates)
        seen.append(counts[1])
    assert seen[5] == 23
    assert seen[-1] == 31


def test_a_path_without_bandwidth_gets_nothing() -> None:
    assert shares(10, [2.0, 0.0, 3.0]) == [4, 0, 6]
    assert slowest_s([4, 0, 6], [2.0, 0.0, 3.0]) == 2.0
    assert replaced([10, 0], [1.0, 0.0]) == [10, 0]
    assert replaced([0, 0], [1.0, 1.0]) == [0, 0]


def test_measuring_a_path_again_costs_little() -> None:
    assert is_worth_measuring(None, 10**9, 0.0)
    assert not is_worth_measuring(1e6, 10**9, 99_000.0)
    assert is_worth_measuring(1e6, 10**9, 100_000.0)
    assert with_one_on(1, [5, 0, 9]) == [5, 1, 8]
