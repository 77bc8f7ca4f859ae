"""A step of version 3, written once and for all, restores value by value."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import statehold
from golden.make_v1 import elements
from statehold.errors import FormatVersionError
from statehold.format import manifest
from statehold.tensors import composed
from support.faults import SMALL
from support.quantized import Made

GOLDEN = Path(__file__).parent / "v3"


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    statehold.allow_tensor_class(Made)
    yield
    composed.allowed.clear()


def numbers(count: int) -> list[complex]:
    flat = struct.unpack(f"<{2 * count}d", elements("F64", 2 * count))
    return [complex(*flat[i : i + 2]) for i in range(0, 2 * count, 2)]


def test_every_value(tmp_path: Path) -> None:
    made = Made.of(torch.zeros(2, 3))
    made.levels = torch.zeros(4, dtype=torch.complex128)
    state: dict[str, Any] = {
        "complex": torch.zeros(2, 2, dtype=torch.complex128),
        "scalar": None,
        "array": numpy.zeros(3, numpy.complex128),
        "made": made,
    }
    with statehold.Checkpointer(GOLDEN, **SMALL) as ckpt:
        got = ckpt.restore(state)
    assert got == 9
    assert state["complex"].reshape(-1).tolist() == numbers(4)
    assert (state["scalar"].item(), state["array"].tolist()) == (numbers(1)[0], numbers(3))
    assert state["made"] is made
    assert made.codes.reshape(-1).tolist() == [-2, -1, 0, 1, 2, 3]
    assert made.levels.tolist() == numbers(4)


def test_an_older_reader_says_that_it_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", 2)
    with statehold.Checkpointer(GOLDEN, **SMALL) as ckpt, pytest.raises(FormatVersionError):
        ckpt.restore({})
