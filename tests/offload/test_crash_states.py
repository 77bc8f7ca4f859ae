"""Every state that a loss of power can leave of steps that share files with their optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sim.crash_states import Sample
from statehold import offload
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.twins import Twins, same_bits

BF16 = torch.bfloat16
TINY = [(1024,), (40, 30)]
STEPS = 4


def state_of(twins: Twins) -> dict[str, Any]:
    return {"params": {str(i): each for i, each in enumerate(twins.params)}, "opt": twins.ours}


def tiny(fs: SimFs, path: str) -> Twins:
    if not fs.is_dir(path):
        fs.mkdir(path)
    return Twins(TINY, [BF16], tiers=[offload.Path(path)], subgroup_bytes=49_152, fs=fs)


def play(fs: SimFs) -> tuple[list[tuple[int, int]], dict[int, dict[int, Any]]]:
    """(number of changes, newest step then) after each commit, and the state of each step."""
    fs.record()
    twins, committed, states = tiny(fs, "/opt"), [(0, 0)], {}
    with checkpointer_on(fs, "/run", keep=1, **SMALL) as ckpt:
        for step in range(1, STEPS + 1):
            twins.train(1)
            states[step] = twins.ours.state_dict()["state"]
            save = ckpt.save(step, state_of(twins))
            twins.train(1)
            save.wait("committed", DEADLINE_S)
            committed.append((len(fs.recorded), step))
    twins.ours.close()
    return committed, states


def check_all(sample: Sample) -> int:
    fs = SimFs(seed=1)
    committed, states = play(fs)
    count = 0
    for moment, operation in enumerate(fs.recorded):
        safe = max(step for begun, step in committed if begun <= moment)
        for disk in sample.of(fs, moment):
            count += 1
            found = steps_of(disk, states, f"power off before {moment}: {operation}")
            assert max(found, default=0) in (safe, safe + 1), f"{found}, and not {safe}"
    return count


def steps_of(disk: SimFs, states: dict[int, dict[int, Any]], when: str) -> list[int]:
    """The steps that a reader finds; AssertionError for one that is not whole."""
    other = tiny(disk, "/other")
    with checkpointer_on(disk, "/run", **SMALL) as ckpt:
        steps = ckpt.steps()
        for step in steps:
            try:
                ckpt.restore(state_of(other), step=step)
            except Exception as error:
                raise AssertionError(f"{when}: step {step} is not whole: {error}") from error
            for index, fields in other.ours.state_dict()["state"].items():
                for name, value in fields.items():
                    assert same_bits(value, states[step][index][name]), (when, step, index, name)
    other.ours.close()
    return steps


@pytest.mark.thorough
def test_every_step_that_a_crash_leaves_is_whole() -> None:
    assert check_all(Sample(2, whole=False)) > 100
