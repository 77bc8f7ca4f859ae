"""What calls cost grows with the steps that a run keeps, and not with their square."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import statehold
from statehold import Checkpointer
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from support.calls import calls_of
from support.faults import DEADLINE_S, SMALL


def run_of(path: Path, steps: int) -> Path:
    """A run of so many steps with the same files."""
    first = path / f"step-{1:012d}"
    with Checkpointer(path, **SMALL) as ckpt:
        ckpt.save(1, {"t": torch.ones(3)}).wait("committed", DEADLINE_S)
    manifest = Manifest.decode((first / MANIFEST_NAME).read_bytes(), "manifest")
    for step in range(2, steps + 1):
        copy = shutil.copytree(first, path / f"step-{step:012d}")
        (copy / MANIFEST_NAME).write_bytes(replace(manifest, step=step).sealed())
    return path


def listed_by_a_checkpointer(run: Path) -> Callable[[], list[int]]:
    ckpt = Checkpointer(run, **SMALL)
    ckpt.steps()  # opens what it needs
    return ckpt.steps


CALLS: dict[str, Callable[[Path], Callable[[], list[int]]]] = {
    "Checkpointer.steps": listed_by_a_checkpointer,
    "open().steps": lambda run: statehold.open(run).steps,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_grow_with_the_steps(name: str, tmp_path: Path) -> None:
    def count(steps: int) -> int:
        call = CALLS[name](run_of(tmp_path / str(steps), steps))
        assert call() == list(range(1, steps + 1))
        return calls_of(call)

    few, some, many = count(10), count(40), count(160)
    assert many - some < 5 * (some - few), (few, some, many)
