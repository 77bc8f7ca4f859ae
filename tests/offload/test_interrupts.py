"""Ctrl-C anywhere in an update: close() returns, and the optimizer refuses what is half done."""

from __future__ import annotations

from pathlib import Path

import torch

from statehold import offload
from statehold.offload import pipeline, workers
from support.interrupts import interrupt_everywhere


def test_ctrl_c_in_an_update_hangs_no_thread_that_close_waits_for(tmp_path: Path) -> None:
    def make() -> offload.AdamW:
        param = torch.nn.Parameter(torch.ones(3 * 4096))
        tiers = [offload.Host(32_768), offload.Path(tmp_path)]
        optimizer = offload.AdamW([param], tiers=tiers, subgroup_bytes=32_768)
        param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer

    places = interrupt_everywhere(
        [pipeline.SubgroupPipeline.visit, pipeline.StallWatch.wait_for_one, workers.Workers.run],
        make,
        offload.AdamW.step,
        offload.AdamW.close,
    )
    assert {"visit", "run"} <= places
