"""Holders are killed and stopped while they serve: the joiner has every bit, or an error."""

from __future__ import annotations

import os
import random

from support.group_ranks import LOST, GroupRank
from support.seeds import SEED

KILLS = int(os.environ.get("STATEHOLD_GROUP_KILLS", "2"))
ELEMENTS = 2_000_000


def test_holders_are_killed_and_stopped_while_they_serve() -> None:
    """STATEHOLD_GROUP_KILLS=1000 for more."""
    print(f"STATEHOLD_SEED={SEED}")
    chance = random.Random(SEED)
    joiner, steady = GroupRank(), GroupRank()
    digest = steady.do("make", 1, ELEMENTS)
    arrived = 0
    victims: list[GroupRank] = []
    for epoch in range(1, KILLS + 1):
        victim = GroupRank()
        victims.append(victim)
        assert victim.do("make", 1, ELEMENTS) == digest
        assert joiner.do("make", 0, ELEMENTS) != digest
        for rank, each in enumerate((victim, steady)):
            assert each.do("serve", victim.desk, epoch, rank, 3) == "serves"
        joiner.begin("fetch", victim.desk, epoch, 2, 3)
        for _ in range(chance.randrange(500_000)):
            pass
        if chance.random() < 0.7:
            victim.kill()
        else:
            victim.stop()
            joiner.revoke()
        found = joiner.answer()
        assert found in (digest, LOST)
        arrived += found == digest
        joiner.do("make", 0, ELEMENTS)
        assert steady.do("serve", steady.desk, 10_000 + epoch, 0, 2) == "serves"
        assert joiner.do("fetch", steady.desk, 10_000 + epoch, 1, 2) == digest
    print(f"{arrived} of {KILLS} transfers have ended with the right state")
    assert KILLS < 40 or 0 < arrived < KILLS
    for each in (joiner, steady, *victims):
        each.kill()
