"""Loss of power before the storage operations of a job of two ranks: before some of them in the
everyday suite, and before each with STATEHOLD_SIM_SEEDS.

At operation k, whichever rank makes it, the machine stops: every later operation of both fails.
Then the disk drops, keeps or tears what was not synced, seeded. The next job must find a committed
step whole on both ranks, and no step that any rank reported as committed may be missing. The ranks
take turns by the seed, so a failure replays.
"""

from __future__ import annotations

import errno
import itertools
import os
from typing import Any

import pytest
import torch

from statehold.errors import StateholdError, StorageError
from support.faults import DEADLINE_S, small, spy_on
from support.in_memory import SimFs
from support.ranks import Ranks
from support.scheduler import Scheduler
from support.seeds import SEED
from support.stepped import simulated

SEEDS = int(os.environ.get("STATEHOLD_SIM_SEEDS", "1"))
EACH = 1 if "STATEHOLD_SIM_SEEDS" in os.environ else 3
SIZE, SAVES = 2, 3
NUMEL = 30_000


class Outlet:
    """Counts the operations of all ranks; from `stop_at` on none happens any more."""

    def __init__(self, turns: Scheduler, stop_at: int | None) -> None:
        self.count = 0
        self.stopped = False
        self._turns = turns
        self._stop_at = stop_at

    def before(self, operation: str, _args: tuple[Any, ...]) -> None:
        self._turns.pause(operation)
        self.count += 1
        if self._stop_at is not None and self.count >= self._stop_at:
            self.stopped = True
            raise StorageError(f"the machine is off before {operation}", errno=errno.EIO)


def content(rank: int, step: int) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.int32) * 31 + step + 1000 * rank


def blank() -> dict[str, Any]:
    zeros = torch.zeros(NUMEL, dtype=torch.int32)
    return {"own": zeros, "same": torch.zeros_like(zeros), "rank": None, "step": 0}


def train(ranks: Ranks, rank: int, outlet: Outlet) -> int:
    """Restore and save on; the newest step that a save of this rank reported as committed."""
    committed, state = 0, blank()
    try:
        start = ranks.ckpts[rank].restore(state) or 0
        spy_on(ranks.ckpts[rank], outlet.before)
        for step in range(start + 1, start + 1 + SAVES):
            state["own"].copy_(content(rank, step))
            state["same"].copy_(content(9, step))
            state |= {"rank": rank, "step": step}
            committed = ranks.ckpts[rank].save(step, state).wait("committed", DEADLINE_S).step
    except StateholdError:
        assert outlet.stopped
    return committed


def save_until(turns: Scheduler, fs: SimFs, stop_at: int | None) -> tuple[int, Outlet]:
    """Save SAVES steps, stopping dead before operation `stop_at`."""
    outlet = Outlet(turns, stop_at)
    with Ranks(fs, SIZE, keep=1, **small(copy_threads=1)) as ranks:
        committed = ranks.each(lambda rank: train(ranks, rank, outlet))
    return max(committed), outlet


def check(fs: SimFs, committed: int) -> None:
    """Both ranks restore the same step, bit for bit, and it is not older than `committed`."""
    with Ranks(fs, SIZE, **small(copy_threads=1)) as ranks:
        found = [blank() for _ in range(SIZE)]
        newest = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]) or 0)
        assert newest[0] == newest[1]
        assert newest[0] >= committed, f"committed step {committed} was lost"
        for step in ranks.ckpts[0].steps():
            ranks.each(lambda rank, step=step: ranks.ckpts[rank].restore(found[rank], step))
            for rank, state in enumerate(found):
                assert (state["rank"], state["step"]) == (rank, step)
                assert torch.equal(state["own"], content(rank, step))
                assert torch.equal(state["same"], content(9, step))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.filterwarnings("error")
def test_power_loss_before_every_operation_of_two_ranks(seed: int) -> None:
    first = 1 + SEED % EACH
    print(f"before operation {first}, then before every {EACH}. one")
    for stop_at in itertools.count(first, EACH):
        with simulated(f"{seed} {stop_at}") as turns:
            fs = SimFs(seed=seed * 1000 + stop_at, short_io=0.2, torn=0.5)
            committed, outlet = save_until(turns, fs, stop_at)
            fs.crash()
            check(fs, committed)
            if not outlet.stopped:
                break
            committed, _ = save_until(turns, fs, None)
            check(fs, committed)
    assert stop_at > 50
