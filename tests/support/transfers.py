"""States for exports and imports: every dtype, ties, views, nothing; and how to compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import statehold
from statehold.tensors.dtypes import NUMPY_TO_TORCH

PACKED = torch.float4_e2m1fn_x2
# Those that safetensors can hold.
DTYPES = [
    *NUMPY_TO_TORCH.values(),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    PACKED,
]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def tensors(*dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    """Every dtype with bits of its own, and odd shapes."""
    raw = torch.arange(96, dtype=torch.uint8)
    found = {
        str(dtype): (raw % 2 if dtype is torch.bool else raw + i).view(dtype)
        for i, dtype in enumerate((*DTYPES, *dtypes))
    }
    tied = torch.randn(3, 4)
    return {
        **found,
        "cut": torch.randn(6, 8).t()[1:5],
        "part": torch.arange(20.0)[3:9],
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5),
        "tied.first": tied,
        "tied.again": tied,
    }


def saved(run: Path, step: int, state: dict[str, Any]) -> str:
    """RUN@STEP of a state that was saved."""
    with statehold.Checkpointer(run) as ckpt:
        ckpt.save(step, state).wait()
    return f"{run}@{step}"


def check_equal(found: Any, expected: Any, path: str = "") -> None:
    """The same types, values and bits at every place."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert bits(found) == bits(expected), path
    elif isinstance(expected, dict):
        assert type(found) is type(expected), path
        assert list(found) == list(expected), path
        for key, value in expected.items():
            check_equal(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert (type(found), len(found)) == (type(expected), len(expected)), path
        for index, value in enumerate(expected):
            check_equal(found[index], value, f"{path}.{index}")
    else:
        assert type(found) is type(expected), path
        assert repr(found) == repr(expected), path
