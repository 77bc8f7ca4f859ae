"""Ctrl-C anywhere in an update or a save: close() returns, and the optimizer refuses what is half
done."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from statehold import offload
from statehold.offload import pipeline, workers
from statehold.offload.state import OffloadedState
from statehold.offload.store import StateFiles
from statehold.tensors.placements import OWN
from statehold.tensors.stored import Role, SavedParameter
from support.interrupts import interrupt_everywhere


def made(folder: Path) -> offload.AdamW:
    param = torch.nn.Parameter(torch.ones(3 * 4096))
    tiers = [offload.Host(32_768), offload.Path(folder)]
    optimizer = offload.AdamW([param], tiers=tiers, subgroup_bytes=32_768)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_ctrl_c_in_an_update_hangs_no_thread_that_close_waits_for(tmp_path: Path) -> None:
    places = interrupt_everywhere(
        [pipeline.SubgroupPipeline.visit, pipeline.StallWatch.wait_for_one, workers.Workers.run],
        partial(made, tmp_path),
        offload.AdamW.step,
        offload.AdamW.close,
    )
    assert {"visit", "run"} <= places


@pytest.mark.thorough
def test_ctrl_c_in_a_save_keeps_no_file_that_close_waits_for(tmp_path: Path) -> None:
    """The save had them, and nobody had the save."""

    def save(optimizer: offload.AdamW) -> None:
        stored = optimizer.stored_parameters([SavedParameter("opt.state.0", OWN, Role.WRITES)])
        assert stored is not None
        stored.release()

    places = interrupt_everywhere(
        [pipeline.SubgroupPipeline.hold, StateFiles.hold, OffloadedState.stored],
        partial(made, tmp_path),
        save,
        offload.AdamW.close,
    )
    assert {"hold", "stored"} <= places
