"""Shares of paths by bandwidth, in turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from statehold.planners.placement import (
    choose_subgroup_bytes,
    in_turns,
    replaced,
    shares,
    slowest_s,
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
    assert choose_subgroup_bytes(6400 * MiB) == 100 * MiB
    assert choose_subgroup_bytes(1 << 50) == 256 * MiB
