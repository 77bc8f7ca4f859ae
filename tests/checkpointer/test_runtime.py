"""A Runtime outlives sessions: another membership uses the same staging memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.io.runtime import Runtime
from statehold.options import Options
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from statehold.units import MiB
from support.faults import DEADLINE_S
from support.in_memory import MemoryBoard, SimFs
from support.inside import borrowed, inside

STAGING = 8 * MiB
OPTIONS: dict[str, Any] = {
    "staging_bytes": STAGING,
    "io": statehold.Io(buffer_bytes=MiB, copy_threads=1),
}
NUMEL = 4 * MiB  # twice the staging memory: every buffer is used


def resident_bytes(runtime: Runtime) -> int:
    """How much of the staging memory has been faulted in."""
    pages = bytearray(STAGING // mmap.PAGESIZE)
    vector = (ctypes.c_char * len(pages)).from_buffer(pages)
    address = ctypes.c_void_p(runtime.engine.staging_address)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(STAGING), vector) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def runtimes(tmp_path: Path) -> Iterator[list[Runtime]]:
    """One for each process of a job. A job has three at most."""
    found = [Runtime(Options(**OPTIONS), str(tmp_path)) for _ in range(3)]
    yield found
    for each in found:
        each.close()


def checkpointer(runtime: Runtime, run: Path, peers: Peers | None) -> statehold.Checkpointer:
    ckpt = statehold.Checkpointer(run, **OPTIONS)
    borrowed(ckpt).runtime = runtime
    borrowed(ckpt).peers = peers
    return ckpt


def session(runtimes: list[Runtime], run: Path, epoch: int, step: int) -> list[int | None]:
    """All ranks of a membership open the run, restore its newest step, save `step`, and close."""
    board, world = MemoryBoard(), len(runtimes)

    def rank_does(rank: int) -> int | None:
        peers = Peers(board, Membership(rank, world, epoch), DEADLINE_S) if world > 1 else None
        mine = {f"of rank {rank}": torch.full((NUMEL,), float(step))}
        with checkpointer(runtimes[rank], run, peers) as ckpt:
            restored = ckpt.restore({"of rank 0": torch.zeros(NUMEL)}, strict=False)
            ckpt.save(step, mine).wait("committed", DEADLINE_S)
        return restored

    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(rank_does, range(world)))


def test_another_membership_uses_the_same_staging_memory(
    run: Path, runtimes: list[Runtime]
) -> None:
    assert session(runtimes[:2], run, epoch=0, step=1) == [None, None]
    before = [(each.engine, each.engine.staging_address) for each in runtimes[:2]]
    faulted = [resident_bytes(each) for each in runtimes[:2]]
    assert all(faulted)  # as many buffers as the disk was slow

    assert session(runtimes, run, epoch=1, step=2) == [1, 1, 1]  # a rank has joined
    assert session(runtimes[:1], run, epoch=2, step=3) == [2]  # two have left

    assert [(each.engine, each.engine.staging_address) for each in runtimes[:2]] == before
    for each, then in zip(runtimes[:2], faulted, strict=True):
        assert resident_bytes(each) >= then


def test_a_checkpointer_gives_back_the_runtime_that_it_opened_and_no_other(
    run: Path, runtimes: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Runtime] = []
    close = Runtime.close
    monkeypatch.setattr(Runtime, "close", lambda self: (closed.append(self), close(self)))
    with statehold.Checkpointer(run, **OPTIONS) as own:
        opened = inside(own).runtime
        assert not closed
    assert closed == [opened]
    session(runtimes[:1], run, epoch=0, step=1)
    assert closed == [opened]


def test_a_file_system_that_is_handed_in_stays_open(tmp_path: Path) -> None:
    fs = SimFs(seed=1)
    runtime = Runtime(Options(**OPTIONS), str(tmp_path), fs=fs)
    assert not runtime.has_own_fs
    runtime.close()
    fs.mkdir("/there")
    assert fs.is_dir("/there")
