"""Checkpoints in the form of DeepSpeed's ZeRO, without DeepSpeed: the same classes by name only."""

from __future__ import annotations

import enum
import math
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

SHAPES = OrderedDict(
    [("0.weight", (7, 5)), ("0.bias", (7,)), ("1.weight", (3, 7)), ("1.bias", (3,))]
)
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


class _Fragment:
    __module__, __qualname__ = "deepspeed.utils.tensor_fragment", "fragment_address"

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class _Stage(int, enum.Enum):
    __module__, __qualname__ = "deepspeed.runtime.zero.config", "ZeroStageEnum"

    gradients = 2
    weights = 3


class _Scaler:
    __module__, __qualname__ = "deepspeed.runtime.fp16.loss_scaler", "LossScaler"

    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch.save name the classes as DeepSpeed's."""
    for kind in (_Fragment, _Stage, _Scaler):
        parts = kind.__module__.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        monkeypatch.setattr(sys.modules[kind.__module__], kind.__qualname__, kind, raising=False)


def reference() -> dict[str, dict[str, torch.Tensor]]:
    """fp32 and the moments of each parameter."""
    torch.manual_seed(3)
    return {name: {key: torch.randn(shape) for key in KEYS} for name, shape in SHAPES.items()}


def write(directory: Path, stage: int, ranks: int, *, latest: bool = True) -> Path:
    """A checkpoint of `reference()`; returns the directory that a user would name."""
    inner = directory / "global_step3"
    inner.mkdir(parents=True)
    if latest:
        (directory / "latest").write_text("global_step3")
    parts = _of_stage_3(ranks) if stage == 3 else _of_stage_2(ranks)
    for rank, optimizer in enumerate(parts):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, inner / name)
        if stage == 3:
            torch.save(
                _model(empty=True), inner / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            )
    if stage != 3:
        torch.save(_model(empty=False), inner / "mp_rank_00_model_states.pt")
    return directory if latest else inner


def _model(*, empty: bool) -> dict[str, Any]:
    module = OrderedDict(
        (name, torch.empty(0, dtype=torch.bfloat16) if empty else fields["fp32"].bfloat16())
        for name, fields in reference().items()
    )
    shapes = OrderedDict((name, torch.Size(shape)) for name, shape in SHAPES.items())
    return {"module": module, "param_shapes": [shapes], "global_steps": 3, "mine": {"epoch": 2}}


def _groups() -> list[dict[str, Any]]:
    return [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]


def _of_stage_2(ranks: int) -> list[dict[str, Any]]:
    flat = {
        key: torch.cat([fields[key].reshape(-1) for fields in reference().values()]) for key in KEYS
    }
    total = flat["fp32"].numel()
    size = -(-total // ranks)
    found = []
    for rank in range(ranks):
        low, high, at, slices = rank * size, min(total, (rank + 1) * size), 0, OrderedDict()
        for name, shape in SHAPES.items():
            begin, end = max(low, at), min(high, at + math.prod(shape))
            if begin < end:
                slices[name] = _Fragment(numel=end - begin, start=begin - low)
            at += math.prod(shape)
        cut = {key: torch.zeros(size) for key in KEYS}
        for key in KEYS:
            cut[key][: high - low] = flat[key][low:high]
        state = {0: {"step": torch.tensor(3.0), **{key: cut[key] for key in KEYS[1:]}}}
        found.append({
            "loss_scaler": _Scaler(), "zero_stage": _Stage.gradients,
            "base_optimizer_state": {"state": state, "param_groups": _groups()},
            "single_partition_of_fp32_groups": [cut["fp32"]],
            "param_slice_mappings": [slices],
        })  # fmt: skip
    return found


def _of_stage_3(ranks: int) -> list[dict[str, Any]]:
    found = []
    for rank in range(ranks):
        cut = {}
        for key in KEYS:
            parts = []
            for fields in reference().values():
                flat = fields[key].reshape(-1)
                size = -(-flat.numel() // ranks)
                padded = torch.zeros(size * ranks)
                padded[: flat.numel()] = flat
                parts.append(padded[rank * size : (rank + 1) * size])
            cut[key] = torch.cat(parts)
        state = {0: {"step": torch.tensor(3.0), **{key: cut[key] for key in KEYS[1:]}}}
        found.append({
            "loss_scaler": _Scaler(), "zero_stage": _Stage.weights,
            "optimizer_state_dict": {"state": state, "param_groups": _groups()},
            "fp32_flat_groups": [cut["fp32"]],
        })  # fmt: skip
    return found
