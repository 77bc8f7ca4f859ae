"""Permutation: a bijection for every size, the same for ever, and mixed well. No test here is
random: the seeds are fixed, so a bound holds or does not hold."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter

import pytest

from statehold.resilience.data.course import SIZE_MAX, Permutation
from statehold.resilience.data.derivation import words


def order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return list(map(Permutation(size, seed, epoch), range(size)))


def test_it_is_a_bijection() -> None:
    for size in [*range(1, 150), 1009, 4095, 4096, 4097]:
        assert sorted(order(size, seed=size)) == list(range(size)), size


@pytest.mark.parametrize("size", [SIZE_MAX, SIZE_MAX - 25, 2**62 + 1, 3037000499**2])
def test_large_sizes_are_covered_evenly(size: int) -> None:
    """Ten thousand numbers: no two alike, and each tenth of the range has its share."""
    one = Permutation(size, seed=3, epoch=1)
    where = [*range(5000), *range(size - 5000, size)]
    found = [one(number) for number in where]
    assert len(set(found)) == len(found)
    assert 0 <= min(found) <= max(found) < size
    counts = Counter(each * 10 // size for each in found)
    assert chi_square([counts[tenth] for tenth in range(10)], 1000) < 4


def test_the_orders_never_change() -> None:
    """Golden values: a checkpoint of today has to go on with the same samples in every release."""
    assert order(10, seed=1, epoch=0) == [4, 7, 0, 1, 6, 3, 2, 5, 9, 8]
    assert order(10, seed=1, epoch=1) == [5, 1, 4, 0, 8, 7, 6, 2, 3, 9]
    large = Permutation(SIZE_MAX, seed=7, epoch=3)
    assert [large(number) for number in (0, 1, SIZE_MAX - 1)] == [
        6699557498697821037,
        421561579303461480,
        3293820917897142057,
    ]
    odd = Permutation(1_000_003, seed=2**64 - 1, epoch=12345678901234567890)
    assert [odd(number) for number in (0, 1, 2, 1_000_002)] == [582402, 544824, 593208, 745874]


def test_derived_words_never_change() -> None:
    assert words("permutation", 1, 0, count=2) == (9646952482077215927, 10174740580870416022)
    assert words("permutation", 10, count=1) != words("permutation", 1, 0, count=1)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_are_equally_likely(size: int) -> None:
    expected = 40
    seeds = range(expected * math.factorial(size))
    counts = Counter(tuple(order(size, seed)) for seed in seeds)
    every = [counts[each] for each in itertools.permutations(range(size))]
    assert min(every) > 0
    assert chi_square(every, expected) < 4


def chi_square(counts: list[int], expected: float) -> float:
    """How many deviations the statistic lies above what even chances give."""
    free = len(counts) - 1
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    return (statistic - free) / math.sqrt(2 * free)


def test_places_neighbours_and_epochs_are_independent() -> None:
    """Correlations of independent orders of n are about 1 / sqrt(n); the bound is 4 times that."""
    size = 2003
    bound = 4 / math.sqrt(size)
    first, second, other_seed = order(size), order(size, epoch=1), order(size, seed=1)
    assert abs(statistics.correlation(range(size), first)) < bound
    assert abs(statistics.correlation(first[1:], first[:-1])) < bound
    assert abs(statistics.correlation(first[50:], first[:-50])) < bound
    assert abs(statistics.correlation(first, second)) < bound
    assert abs(statistics.correlation(first, other_seed)) < bound
    parities = [each % 2 for each in first]
    assert abs(statistics.correlation(parities, [each % 2 for each in range(size)])) < bound


def test_each_place_gets_each_number_evenly() -> None:
    size, expected = 16, 40
    orders = [order(size, seed=5, epoch=epoch) for epoch in range(size * expected)]
    for place in range(size):
        counts = Counter(each[place] for each in orders)
        assert chi_square([counts[number] for number in range(size)], expected) < 4
    stay = sum(each[place] == place for each in orders for place in range(size))
    assert abs(stay / len(orders) - 1) < 4 / math.sqrt(len(orders))  # one on average, deviation 1
