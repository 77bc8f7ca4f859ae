"""Ranks are killed and stopped while they build and use groups; the others end, and go on."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence

import pytest

from support.group_ranks import LOST, GroupRank
from support.seeds import SEED

KILLS = int(os.environ.get("STATEHOLD_GROUP_KILLS", "3"))
ELEMENTS = 300_000


class Gang:
    """Living ranks, and the number of the newest epoch."""

    def __init__(self) -> None:
        self.ranks: list[GroupRank] = []
        self.epoch = 0

    def fill(self, size: int) -> None:
        self.ranks += [GroupRank() for _ in range(size - len(self.ranks))]

    def begin_building(self, ranks: Sequence[GroupRank]) -> None:
        """All ranks of the gang are in the epoch, but only `ranks` know of it."""
        self.epoch += 1
        for place, each in enumerate(self.ranks):
            if each in ranks:
                each.begin("build", self.ranks[0].desk, self.epoch, place, len(self.ranks))

    def build(self) -> None:
        self.begin_building(self.ranks)
        assert self.answers(self.ranks) == ["built"] * len(self.ranks)

    def check(self) -> None:
        """Sums and votes of all are right."""
        total = sum(range(1, len(self.ranks) + 1))
        for place, each in enumerate(self.ranks):
            each.begin("sum", place + 1, ELEMENTS)
        assert self.answers(self.ranks) == [[total, total]] * len(self.ranks)
        for place, each in enumerate(self.ranks):
            each.begin("gather", place)
        assert self.answers(self.ranks) == [list(range(len(self.ranks)))] * len(self.ranks)

    def answers(self, ranks: Sequence[GroupRank]) -> list[object]:
        return [each.answer() for each in ranks]

    def give_up(self, ranks: Sequence[GroupRank]) -> list[object]:
        """The answers of ranks that wait for lost ones, after their epoch has ended."""
        for each in ranks:
            each.revoke()
        return self.answers(ranks)

    def lose(self, rank: GroupRank) -> list[GroupRank]:
        self.ranks.remove(rank)
        return self.ranks


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    found = Gang()
    yield found
    for each in found.ranks:
        each.kill()


@pytest.mark.thorough
def test_a_stopped_rank_holds_nobody_and_cannot_come_back(gang: Gang) -> None:
    """R9, R10."""
    gang.fill(4)
    gang.build()
    gang.check()
    stopped = gang.ranks[1]
    stopped.stop()
    others = gang.lose(stopped)
    for each in others:
        each.begin("sum", 1, ELEMENTS)
    assert gang.give_up(others) == [LOST] * 3
    gang.build()
    gang.check()
    stopped.begin("sum", 1000, ELEMENTS)
    stopped.go_on()
    assert stopped.answer() == LOST
    gang.check()
    stopped.kill()


def test_a_rank_is_killed_during_a_vote(gang: Gang) -> None:
    gang.fill(4)
    gang.build()
    victim = gang.ranks[3]
    others = gang.lose(victim)
    for each in others:
        each.begin("gather", 1)
    victim.kill()
    assert gang.give_up(others) == [LOST] * 3
    gang.build()
    gang.check()


def test_a_rank_that_never_comes_is_not_waited_for(gang: Gang) -> None:
    gang.fill(3)
    others = gang.ranks[:2]
    gang.begin_building(others)
    assert gang.give_up(others) == [LOST] * 2
    gang.build()
    gang.check()


def test_the_rank_with_the_desk_is_killed_while_others_meet_there(gang: Gang) -> None:
    """Nobody has to tell them."""
    gang.fill(3)
    victim, *others = gang.ranks
    gang.begin_building(others)
    victim.kill()
    assert gang.answers(others) == [LOST] * 2
    gang.lose(victim)
    gang.build()
    gang.check()


def test_ranks_are_killed_and_stopped_at_random_moments(gang: Gang) -> None:
    """STATEHOLD_GROUP_KILLS=1000 for more."""
    print(f"STATEHOLD_SEED={SEED}")
    chance = random.Random(SEED)
    lost = 0
    for _ in range(KILLS):
        gang.fill(4)
        what = chance.choice(["build", "sum", "gather"])
        if what == "build":
            gang.begin_building(gang.ranks)
        else:
            gang.build()
            for each in gang.ranks:
                each.begin(what, *((1, 10 * ELEMENTS) if what == "sum" else (1,)))
        victim = chance.choice(gang.ranks)
        others = gang.lose(victim)
        for _ in range(chance.randrange(20_000)):
            pass
        (victim.stop if chance.random() < 0.3 else victim.kill)()
        for found in gang.give_up(others):
            assert found in (LOST, "built", [4, 4], [1, 1, 1, 1])
            lost += found == LOST
        gang.build()
        gang.check()
        victim.kill()
    assert lost > 0
