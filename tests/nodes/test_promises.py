"""What a level of several hosts reports as copied survives the loss of any one host.

In one process: each host has a simulated disk, ranks are threads. Copies are held up, so that other
things happen before they end: younger saves, or a failure of the level.
"""

from __future__ import annotations

import errno
from typing import Any

import pytest

from nodes.test_hosts import flush, restored_of, save
from statehold import Directory
from statehold.errors import StorageError
from support.faults import DEADLINE_S, must
from support.hosts import LOCAL, HostRanks, disks, local
from support.inside import promoter
from support.levels import HeldCopy, settle, status, steps_at

HOSTS = 3
COPIES = "local.copies"
SECOND = Directory(path="/second", per_host=True, copies=1, name="second", keep=2)


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
        with HeldCopy(ranks.ckpts[1], COPIES) as held:
            save(ranks, 2, 3, 4, 5)
            must(held.waiting.wait(DEADLINE_S))
        settled(ranks)
        assert status(ranks.ckpts[0], COPIES).newest == 2
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[2, 4, 5]] * HOSTS
        assert [steps_at(fs, LOCAL) for fs in hosts] == [[2, 4, 5]] * HOSTS
        kill(ranks)
    left = [fs for fs in hosts if fs is not hosts[lost]]
    with HostRanks(left) as ranks:
        assert restored_of(ranks, HOSTS) == 2


# -- a farther level ---------------------------------------------------------------------------


def test_copies_do_not_count_without_the_files_of_their_level(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("the disk is gone", errno=errno.EIO, path="")

    hosts = disks(HOSTS)
    with HostRanks(hosts, [local(), SECOND]) as ranks:
        with monkeypatch.context() as broken:
            broken.setattr(promoter(ranks.ckpts[1], "second").place, "take", refuse)
            save(ranks, 1)
            settled(ranks)
        for level in ("second", "second.copies"):
            assert status(ranks.ckpts[0], level).newest is None
            assert status(ranks.ckpts[0], level).error is not None
        save(ranks, 2)
        settled(ranks)
        for level in ("second", "second.copies"):
            assert status(ranks.ckpts[0], level).newest == 2
