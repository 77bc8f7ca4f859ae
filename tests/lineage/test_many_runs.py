"""What the lineage of many runs costs grows with the runs, and not with their square."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from statehold import Checkpointer
from statehold.lineage.family import family
from support.calls import calls_of
from support.faults import DEADLINE_S, SMALL


def forks_of_a_run(folder: Path, count: int) -> Path:
    state = {"t": torch.ones(3)}
    with Checkpointer(folder / "base", **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
    with Checkpointer(folder / "fork-000", **SMALL) as ckpt:
        ckpt.restore(state, source=f"{folder / 'base'}@1")
        ckpt.save(2, state).wait("committed", DEADLINE_S)
    for number in range(1, count):
        shutil.copytree(folder / "fork-000", folder / f"fork-{number:03d}")
    return folder


def test_calls_grow_with_the_runs(tmp_path: Path) -> None:
    def count(runs: int) -> int:
        folder = forks_of_a_run(tmp_path / str(runs), runs)
        found = family(folder)
        assert [each.base for each in found] == [None] + [str(folder / "base")] * runs
        return calls_of(lambda: family(folder))

    few, some, many = count(10), count(40), count(160)
    assert many - some < 5 * (some - few), (few, some, many)
