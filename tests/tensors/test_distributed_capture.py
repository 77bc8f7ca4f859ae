"""Capture in a job of four ranks; the checks themselves are in support.capture_checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support.jobs import OK, checks_of, run_job
from support.matching import MemoryStep, captured


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_job("support.capture_checks", 4)


@pytest.mark.thorough
@pytest.mark.parametrize("check", checks_of("support.capture_checks"))
def test_on_four_ranks(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == OK, outcomes[check]


def test_a_job_of_one_rank_has_no_layouts(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        saved, live = (fully_shard(nn.Linear(3, 2), mesh=mesh) for _ in range(2))
        specs = [each.spec for each in captured({"m": saved}).values()]
        assert [(spec.layout, spec.shape) for spec in specs] == [(None, (2, 3)), (None, (2,))]
        MemoryStep({"m": saved}).restore({"m": live})
        assert torch.equal(live.weight.full_tensor(), saved.weight.full_tensor())
        plain = nn.Linear(3, 2)
        MemoryStep({"m": saved}).restore({"m": plain})
        assert torch.equal(plain.weight, saved.weight.full_tensor())
    finally:
        distributed.destroy_process_group()
