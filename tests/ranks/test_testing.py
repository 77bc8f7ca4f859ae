"""statehold.testing: the ranks of a job as threads, on a real file system, for tests of users."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import statehold
from statehold.errors import PeerFailedError
from statehold.testing import ranks_on
from support.faults import DEADLINE_S

WORLD = 3


def own(rank: int) -> dict[str, torch.Tensor]:
    return {"all": torch.ones(8), f"of {rank}": torch.full((4,), float(rank))}


def on_all(run: Path, work: Callable[[int, statehold.Checkpointer], object]) -> list[object]:
    ckpts = ranks_on(None, run, WORLD, peer_timeout_s=DEADLINE_S)
    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(work, range(WORLD), ckpts))


def test_ranks_commit_one_step_that_each_of_them_restores(tmp_path: Path) -> None:
    def save(rank: int, ckpt: statehold.Checkpointer) -> None:
        with ckpt:
            ckpt.save(1, own(rank)).wait("committed")

    def restore(rank: int, ckpt: statehold.Checkpointer) -> object:
        state = {name: torch.zeros_like(value) for name, value in own(rank).items()}
        with ckpt:
            step = ckpt.restore(state)
        return step, {name: value.tolist() for name, value in state.items()}

    on_all(tmp_path / "run", save)
    told = on_all(tmp_path / "run", restore)
    assert told == [(1, {n: v.tolist() for n, v in own(rank).items()}) for rank in range(WORLD)]
    whole = statehold.load(tmp_path / "run")
    assert set(whole) == {"all", *(f"of {rank}" for rank in range(WORLD))}


def test_a_rank_that_fails_fails_the_save_of_all(tmp_path: Path) -> None:
    def save(rank: int, ckpt: statehold.Checkpointer) -> object:
        state = own(rank) if rank else {"all": object()}
        with ckpt, pytest.raises(statehold.StateholdError) as caught:
            ckpt.save(1, state).wait("committed")
        return type(caught.value)

    refused, *others = on_all(tmp_path / "run", save)
    assert others == [PeerFailedError] * (WORLD - 1)
    assert refused is not PeerFailedError
    assert not list((tmp_path / "run").glob("step-*[0-9]"))
