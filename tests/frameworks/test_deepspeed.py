"""Checkpoints of the real DeepSpeed come in from ZeRO, and it loads what goes out, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import statehold

pytest.importorskip("deepspeed")

SCRIPT = Path(__file__).parent / "zero_ranks.py"


def ranks(count: int, *words: object) -> None:
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
    ]
    subprocess.run(
        [*run, SCRIPT, *map(str, words)], check=True, timeout=300, capture_output=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_comes_in_and_goes_on_with_another_world(tmp_path: Path, stage: int) -> None:
    ranks(2, "save", stage, tmp_path / "zero", tmp_path / "saved.pt")
    expected = torch.load(tmp_path / "saved.pt", weights_only=True)
    step = f"{tmp_path / 'run'}@3"
    statehold.import_step(tmp_path / "zero", step)
    found = statehold.load(step)
    assert found["deepspeed"]["mine"] == 7
    for name, fields in expected.items():
        assert torch.equal(found["fp32"][name], fields.pop("fp32"))
        for key, moment in fields.items():
            assert torch.equal(found["optimizer"]["state"][f"model.{name}"][key], moment)
    statehold.export_step(step, tmp_path / "universal", "deepspeed-universal")
    target = min(stage, 2)  # ZeRO-3 asks for a file of each rank
    ranks(3, "load", target, tmp_path / "universal", tmp_path / "loaded.pt")
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    for name, fields in torch.load(tmp_path / "saved.pt", weights_only=True).items():
        for key, tensor in fields.items():
            assert torch.equal(loaded[name][key], tensor), (name, key)
