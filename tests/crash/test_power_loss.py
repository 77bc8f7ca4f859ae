"""Loss of power before every storage operation: all that was not synced may be gone or mixed.

Runs on the simulated disk: at operation k the machine stops (every later operation fails), then the
disk drops, keeps or tears what was not synced, seeded. The next start must find a committed step
whole, and no step that was reported as committed may be missing. The threads of a save take turns
by the seed, so a failure replays.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from statehold.errors import StateholdError, StorageError
from support.faults import DEADLINE_S, small, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.scheduler import Scheduler
from support.stepped import simulated

SEEDS = int(os.environ.get("STATEHOLD_SIM_SEEDS", "1"))
SAVES = 3
NUMEL = 300_000
ONE_THREAD = small(copy_threads=1)


def content(step: int) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.int32) * 31 + step


def save_until(turns: Scheduler, fs: SimFs, stop_at: int | None) -> tuple[int, int]:
    """Save SAVES steps, stopping dead before operation `stop_at`; (committed, operations)."""
    count = committed = 0

    def before(operation: str, _args: tuple[Any, ...]) -> None:
        nonlocal count
        turns.pause(operation)
        count += 1
        if stop_at is not None and count >= stop_at:
            raise StorageError(f"the machine is off before {operation}", errno=errno.EIO)

    ckpt = checkpointer_on(fs, "/runs/x", keep=1, **ONE_THREAD)
    state: dict[str, Any] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "step": 0}
    try:
        with ckpt:
            start = ckpt.restore(state) or 0
            spy_on(ckpt, before)
            for step in range(start + 1, start + 1 + SAVES):
                state["w"].copy_(content(step))
                state["step"] = step
                committed = ckpt.save(step, state).wait("committed", DEADLINE_S).step
    except StateholdError:
        assert stop_at is not None
    return committed, count


def check(fs: SimFs, committed: int) -> None:
    state: dict[str, Any] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "step": 0}
    with checkpointer_on(fs, "/runs/x", **ONE_THREAD) as ckpt:
        restored = ckpt.restore(state) or 0
        assert restored >= committed, f"committed step {committed} was lost"
        for step in ckpt.steps():
            ckpt.restore(state, step)
            assert state["step"] == step
            assert torch.equal(state["w"], content(step))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.filterwarnings("error")
def test_power_loss_before_every_operation(seed: int) -> None:
    with simulated(seed) as turns:
        _, operations = save_until(turns, SimFs(seed=seed), None)
    assert operations > 25
    for stop_at in range(1, operations + 1):
        with simulated(f"{seed} {stop_at}") as turns:
            fs = SimFs(seed=seed * 1000 + stop_at, short_io=0.2, torn=0.5)
            committed, _ = save_until(turns, fs, stop_at)
            fs.crash()
            check(fs, committed)
            committed, _ = save_until(turns, fs, None)
            check(fs, committed)
