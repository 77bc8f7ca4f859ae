"""Stacks of shards on replicas: the guarantees of SPARe."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from statehold.errors import UsageError
from statehold.planners.policies import spread


def test_two_shards_share_one_replica_at_most() -> None:
    stacks = spread(200, 9)
    for a, b in combinations(range(200), 2):
        assert len({*stacks.holders(a)} & {*stacks.holders(b)}) <= 1
    assert all(r in stacks.holders(s) for r in range(200) for s in stacks.held(r))


def test_stacks_are_neighbours_where_distinct_differences_do_not_fit() -> None:
    assert spread(8, 5).shifts == (0, 1, 2, 3, 4)
    with pytest.raises(UsageError, match="that many replicas"):
        spread(4, 5)


def test_any_losses_below_the_redundancy_leave_each_shard_a_holder() -> None:
    assert all(spread(13, 4).works({*lost}) for lost in combinations(range(13), 3))


def test_works_says_whether_each_shard_has_a_holder() -> None:
    stacks, random_, seen = spread(30, 3), random.Random(3), set[bool]()
    for _ in range(200):
        lost = {*random_.sample(range(30), random_.randrange(1, 22))}
        enough = stacks.works(lost)
        seen.add(enough)
        assert enough is all({*stacks.holders(shard)} - lost for shard in range(30))
    assert seen == {True, False}
