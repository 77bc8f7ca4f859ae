"""Hosts that do not share a directory that all ranks use: no part of a step is committed there, and
no job begins with nothing where a rank sees steps."""

from __future__ import annotations

import pytest
import torch

from statehold import Directory
from statehold.errors import StateholdError
from support.faults import DEADLINE_S
from support.hosts import HostRanks, disks, local
from support.in_memory import SimFs
from support.levels import steps_at
from support.ranks import Ranks


def state(rank: int) -> dict[str, object]:
    return {"w": torch.arange(64), "own": rank + 0.5}


def test_a_save_into_a_run_directory_that_hosts_do_not_share_fails_on_all_ranks() -> None:
    with HostRanks(disks(2), levels=[Directory()]) as job:
        here, elsewhere = job.failures(1, state)
        assert "rank 0 does not see the files of rank 1" in str(here)
        assert "still safe" in str(here)
        assert "per_host=True" in str(here)
        assert "rank 0 does not see the files of rank 1" in str(elsewhere)
        assert [steps_at(fs, job.run) for fs in job.disks] == [[], []]
        job.failures(2, state)
        names = {name for fs in job.disks for name, _ in fs.listdir(job.run)}
        assert not [name for name in names if name.startswith("step-")], "the disk would fill"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_copy_to_a_level_that_hosts_do_not_share_is_not_committed(ranks: int) -> None:
    levels = [local(), Directory(path="/far", every=1, name="far")]
    with HostRanks(disks(ranks), levels=levels) as job:
        job.save(1, state)
        job.outcomes(lambda rank: job.ckpts[rank].flush(DEADLINE_S))
        assert steps_at(job.disks[0], "/far") == []
        for rank in range(ranks):
            far = job.ckpts[rank].levels()[1]
            assert far.newest is None
            assert "rank 0 does not see the files of rank 1" in str(far.error)
            assert "per_host=True" in str(far.error)


def test_the_same_levels_on_one_host_take_all_steps() -> None:
    levels = [local(), Directory(path="/far", every=1, name="far")]
    with HostRanks(disks(1, 3), levels=levels) as job:
        job.save(1, state)
        job.each(lambda rank: job.ckpts[rank].flush(DEADLINE_S))
        assert steps_at(job.disks[0], "/far") == [1]


@pytest.mark.parametrize("missing", range(3))
def test_a_restart_where_one_rank_does_not_see_the_steps_fails_on_all_ranks(missing: int) -> None:
    shared = SimFs(seed=7)
    with Ranks(shared, 3, run="/run") as job:
        job.save(1, state)
    seen = [SimFs(seed=8) if rank == missing else shared for rank in range(3)]
    with HostRanks(seen, levels=[Directory()]) as job:
        told = job.outcomes(lambda rank: job.ckpts[rank].restore(state(rank)))
        assert all(isinstance(each, StateholdError) for each in told), told
        assert all(f"rank {missing} does not see" in str(each) for each in told), told
        assert all("mounted" in str(each) for each in told), told


def test_a_run_whose_steps_rank_0_does_not_see_does_not_begin_from_its_parent_again() -> None:
    """Only the disk of the run is missing there; that of its parent is mounted."""
    alone, shared = SimFs(seed=7), SimFs(seed=8)
    for fs in (alone, shared):
        with Ranks(fs, 2, run="/base") as job:
            job.save(1, state)
    with Ranks(shared, 2, run="/run") as job:
        job.save(5, state)
    with HostRanks([alone, shared], levels=[Directory()], parent="/base@1") as job:
        told = job.outcomes(lambda rank: job.ckpts[rank].restore(state(rank)))
        assert all(isinstance(each, StateholdError) for each in told), told
        assert all("rank 0 does not see" in str(each) for each in told), told
    assert steps_at(alone, "/run") == []


def test_a_run_that_no_rank_has_begun_is_none_on_all_ranks() -> None:
    with HostRanks(disks(2), levels=[local(), Directory(path="/far", every=1)]) as job:
        assert job.each(lambda rank: job.ckpts[rank].restore(state(rank))) == [None, None]
