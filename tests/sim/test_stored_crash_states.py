"""The power goes off before every change of a run that saves state that lies in files.

The files are never synced by the object that has them, and are overwritten as soon as no step
links them any more. Each state that a crash can leave has the newest committed step or the one that
was being saved, whole, and every older step that a reader can find is whole, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sim.crash_states import Sample
from statehold.steps.store import Store
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.stored import OnFiles

CUTS = ([("avg", 0, 1024)], [("avg", 1024, 1500)])
STEPS = 5


def tensors() -> dict[str, torch.Tensor]:
    return {"avg": torch.arange(1500, dtype=torch.float32)}


def play(fs: SimFs) -> list[tuple[int, int]]:
    """(number of changes, newest step then) after each commit."""
    fs.record()
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    committed = [(0, 0)]
    with checkpointer_on(fs, "/run", keep=1, **SMALL) as ckpt:
        for step in range(1, STEPS + 1):
            weight = torch.full((300,), stored.value)
            ckpt.save(step, {"optimizer": stored, "weight": weight}).wait("committed", DEADLINE_S)
            committed.append((len(fs.recorded), step))
            stored.update(1.0)
    reused = stored.reused
    stored.close()
    assert reused > 0
    return committed


def whole_steps(disk: SimFs) -> Iterator[int]:
    """The steps that a reader finds; AssertionError for one that is not whole."""
    with checkpointer_on(disk, "/run", **SMALL) as ckpt:
        for step in ckpt.steps():
            moments = {"avg": torch.zeros(1500)}
            found: dict[str, Any] = {
                "optimizer": {"moments": moments, "value": -1.0},
                "weight": torch.zeros(300),
            }
            try:
                ckpt.restore(found, step=step)
            except Exception as error:
                raise AssertionError(f"step {step} is not whole: {error}") from error
            assert torch.equal(moments["avg"], tensors()["avg"] + (step - 1))
            assert found["optimizer"]["value"] == step - 1
            yield step


def check_all(sample: Sample) -> int:
    fs = SimFs(seed=1)
    committed = play(fs)
    states = 0
    for moment, operation in enumerate(fs.recorded):
        safe = max(step for begun, step in committed if begun <= moment)
        for disk in sample.of(fs, moment):
            states += 1
            try:
                steps = list(whole_steps(disk))
                assert max(steps, default=0) in (safe, safe + 1), f"{steps}, and not {safe}"
            except AssertionError as error:
                raise AssertionError(f"power off before {moment}: {operation}: {error}") from error
    return states


@pytest.mark.thorough
def test_every_crash_state() -> None:
    assert check_all(Sample(3, whole=True)) > 200


def test_files_that_are_not_synced_before_the_step_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Store, "sync_links", lambda *_: None)
    with pytest.raises(AssertionError, match="is not whole"):
        check_all(Sample(3, whole=True))
