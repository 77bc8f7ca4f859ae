"""States that differ in every element from step to step, and what a restore must bring back."""

from __future__ import annotations

from typing import Any

import torch

import statehold
from support.faults import DEADLINE_S, small
from support.inside import inside

# What goes through libc, and so through faulty.c.
THREADS: dict[str, Any] = small(backend="threads")

NUMEL = 700_000  # 2.7 MiB: more than the staging memory, and a tail that is not aligned
FITS = 100_000  # less than the staging memory: a save of it waits for no write


def content(step: int, numel: int = NUMEL) -> dict[str, Any]:
    return {"w": torch.arange(numel, dtype=torch.int32) * 31 + step, "step": step}


def committed(ckpt: statehold.Checkpointer, step: int, numel: int = NUMEL) -> statehold.Save:
    """Save a step and see it through, retention included."""
    save = ckpt.save(step, content(step, numel)).wait("committed", DEADLINE_S)
    inside(ckpt).pipeline.drain()
    return save


def check_restored(ckpt: statehold.Checkpointer, expected: int, numel: int = NUMEL) -> None:
    """Every committed step is whole, bit for bit, and `expected` is the newest."""
    steps = ckpt.steps()
    if not steps or steps[-1] != expected:
        raise AssertionError(f"expected {expected} to be the newest of {steps}")
    for step in steps:
        live = content(0, numel)
        ckpt.restore(live, step)
        if live["step"] != step or not torch.equal(live["w"], content(step, numel)["w"]):
            raise AssertionError(f"step {step} is not what was saved")
