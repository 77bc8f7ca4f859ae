"""Stacks of shards on replicas: the guarantees of SPARe, at the start and after losses."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from statehold.errors import UsageError
from statehold.planners.stacks import Arrangement, Stacks, arrange, spread


def covered(found: Arrangement) -> Counter[int]:
    return Counter(shard for each in found.orders for shard in found.computes(each))


def test_two_shards_share_one_replica_at_most() -> None:
    stacks = spread(200, 9)
    for a, b in combinations(range(200), 2):
        assert len({*stacks.holders(a)} & {*stacks.holders(b)}) <= 1
    assert all(r in stacks.holders(s) for r in range(200) for s in stacks.held(r))


def test_stacks_are_neighbours_where_distinct_differences_do_not_fit() -> None:
    assert spread(8, 5).shifts == (0, 1, 2, 3, 4)
    with pytest.raises(UsageError, match="that many replicas"):
        spread(4, 5)


def test_any_losses_below_the_redundancy_leave_an_arrangement() -> None:
    stacks = spread(13, 4)
    for lost in combinations(range(13), 3):
        found = arrange(stacks, {*lost})
        assert found is not None
        assert {*covered(found)} == {*range(13)}
        assert found.depth <= 4


@pytest.mark.parametrize("copies", [1, 2])
def test_survivors_reorder_until_a_shard_has_too_few_holders(copies: int) -> None:
    random_ = random.Random(copies)
    for _ in range(5):
        stacks, lost, ended = spread(40, 5), set[int](), False
        found = arrange(stacks, lost, copies=copies)
        for replica in random_.sample(range(40), 40):
            lost.add(replica)
            left = [len({*stacks.holders(shard)} - lost) for shard in range(40)]
            after = arrange(stacks, lost, found, copies)
            if after is None:
                ended = True
                assert min(left) < copies
                break
            assert min(left) >= copies
            assert {*after.orders} == {*range(40)} - lost
            assert all({*after.orders[i]} == {*stacks.held(i)} for i in after.orders)
            assert min(covered(after)[shard] for shard in range(40)) >= copies
            assert -(-copies * 40 // (40 - len(lost))) <= after.depth <= 5
            found = after
        assert ended


def test_nobody_moves_unless_a_shard_is_missing() -> None:
    stacks = spread(60, 6)
    start = arrange(stacks, set(), copies=2)
    assert start is not None
    assert start.depth == 2
    assert all(start.missing([each]) == [] for each in range(60))
    after = arrange(stacks, {7}, start)
    assert after is not None
    assert after.orders == {each: start.orders[each] for each in range(60) if each != 7}


def test_without_copies_a_loss_leaves_its_shards_missing() -> None:
    start = arrange(spread(60, 6), set())
    assert start is not None
    assert start.missing([7]) == [7]


def test_the_least_depth_is_reached_nearly_always_while_half_may_be_lost() -> None:
    stacks, random_, least = spread(100, 7), random.Random(1), 0
    for _ in range(20):
        found = arrange(stacks, {*random_.sample(range(100), 30)})
        assert found is not None
        least += found.depth == 2
    assert least >= 18


def test_works_says_what_arrange_finds() -> None:
    stacks, random_, seen = spread(30, 3), random.Random(3), set[bool]()
    for _ in range(200):
        lost = {*random_.sample(range(30), random_.randrange(1, 22))}
        enough = stacks.works(lost)
        seen.add(enough)
        assert enough is all({*stacks.holders(shard)} - lost for shard in range(30))
        if arrange(stacks, lost) is not None:
            assert enough
    assert seen == {True, False}


def test_a_job_without_survivors_has_no_arrangement() -> None:
    assert arrange(Stacks(2, (0, 1)), {0, 1}) is None
