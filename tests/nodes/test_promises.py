"""What a level of several hosts reports as copied survives the loss of any one host.

In one process: each host has a simulated disk, ranks are threads. Copies are held up, so that other
things happen before they end: younger saves, the same step again, a look at all steps.
"""

from __future__ import annotations

import pytest

from nodes.test_hosts import flush, restored_of, save
from support.faults import DEADLINE_S, must
from support.hosts import LOCAL, HostRanks, disks
from support.levels import HeldCopy, settle, status, steps_at

HOSTS = 3


def settled(ranks: HostRanks) -> None:
    """Return once no rank has a save or a copy under way."""
    ranks.each(lambda rank: settle(ranks.ckpts[rank]))


def kill(ranks: HostRanks) -> None:
    """End all ranks without copying anything more."""
    for ckpt in ranks.ckpts:
        ckpt._close(flush=False)


@pytest.mark.parametrize("lost", range(HOSTS))
def test_a_step_whose_copy_ends_after_many_younger_saves(lost: int) -> None:
    hosts = disks(HOSTS)
    with HostRanks(hosts) as ranks:
        save(ranks, 1)
        flush(ranks)
        with HeldCopy(ranks.ckpts[1], "local.copies") as held:
            save(ranks, 2, 3, 4, 5)
            must(held.waiting.wait(DEADLINE_S))
        settled(ranks)
        assert status(ranks.ckpts[0], "local.copies").newest == 2
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[2, 4, 5]] * HOSTS
        assert [steps_at(fs, LOCAL) for fs in hosts] == [[2, 4, 5]] * HOSTS
        kill(ranks)
    left = [fs for fs in hosts if fs is not hosts[lost]]
    with HostRanks(left) as ranks:
        assert restored_of(ranks, HOSTS) == 2
