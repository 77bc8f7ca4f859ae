"""A level that each host has for itself: any one host is lost, and nothing of the run is.

In one process: each host has a simulated disk, ranks are threads. What is compared is what the
ranks hold, element by element, after a restore on the hosts that are left.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.faults import DEADLINE_S, must
from support.hosts import LOCAL, HostRanks, disks, local
from support.levels import status
from support.rank_states import blank, check, state

FAR = "/far"
COPIES = f"{LOCAL}-copies"


def save(ranks: HostRanks, *steps: int) -> None:
    for step in steps:
        ranks.save(step, lambda rank, step=step: state(rank, step))


def flush(ranks: HostRanks) -> None:
    ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))


def restored(ranks: HostRanks, saved_by: int) -> int | None:
    """Restore on all ranks; compare with what `saved_by` ranks have saved, those that are more with
    the first. The step."""
    found = [blank() for _ in range(ranks.size)]
    got = set(ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank])))
    must(len(got) == 1, got)
    step = got.pop()
    if step is not None and ranks.size == saved_by:
        for rank in range(ranks.size):
            check(found[rank], rank, step)
    return step


def restored_of(ranks: HostRanks, saved_by: int) -> int | None:
    """As `restored` on another number of ranks: what all have saved alike, and each rank's own by
    those who are left."""
    found = [{"w": blank()["w"], "step": None} for _ in range(ranks.size)]
    got = ranks.each(
        lambda rank: ranks.ckpts[rank].restore(found[rank], only=["w", "step"], strict=False)
    )
    for each in found:
        must(each["step"] == got[0])
        must(bool((each["w"] == state(0, each["step"])["w"]).all()))
    return got[0]


@pytest.mark.parametrize("each", [1, 2])
def test_all_ranks_see_the_steps_of_all_hosts(each: int) -> None:
    hosts = disks(3, each)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2, 3)
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()[-2:]) == [[2, 3]] * 3 * each
        assert restored(ranks, 3 * each) == 3
    with HostRanks(hosts) as ranks:
        assert restored(ranks, 3 * each) == 3
        save(ranks, 4)
        assert restored(ranks, 3 * each) == 4


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("each", [1, 2])
def test_any_one_host_is_lost_and_the_others_go_on(lost: int, each: int) -> None:
    hosts = disks(4, each)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2, 3)
        flush(ranks)
    left = [fs for fs in hosts if fs is not hosts[lost * each]]
    must(len(left) == 3 * each)
    with HostRanks(left) as ranks:
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()[-1]) == [3] * 3 * each
        assert restored_of(ranks, 4 * each) == 3
        flush(ranks)  # copies of what the lost host held are there again
        assert status(ranks.ckpts[0], "local.copies").newest == 3
        save(ranks, 4, 5)
        flush(ranks)
    with HostRanks(left[each:]) as ranks:  # and another one
        assert restored_of(ranks, 3 * each) == 5


@pytest.mark.parametrize("lost", range(3))
def test_a_second_host_is_lost_before_anything_new_was_saved(lost: int) -> None:
    hosts = disks(4)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2)
        flush(ranks)
    with HostRanks(hosts[1:]) as ranks:
        assert restored_of(ranks, 4) == 2
        flush(ranks)
    left = [fs for index, fs in enumerate(hosts[1:]) if index != lost]
    with HostRanks(left) as ranks:
        assert restored_of(ranks, 4) == 2


def test_a_job_of_the_same_size_on_fewer_hosts_has_every_value_of_every_rank() -> None:
    hosts = disks(4)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2)
        flush(ranks)
    left = hosts[:2] + hosts[3:] + hosts[3:]
    with HostRanks(left) as ranks:
        assert restored(ranks, 4) == 2
        save(ranks, 3)
        assert restored(ranks, 4) == 3


def test_without_copies_a_lost_host_takes_its_steps_with_it(caplog: Any) -> None:
    hosts = disks(3)
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        save(ranks, 1, 2)
    with HostRanks(hosts[:2], [local(copies=0)]) as ranks:
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[], []]
    assert "step 2 is not whole at level local: files of rank 2" in caplog.text
