"""A step written once and for all restores through the public interface, value by value."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import statehold
from golden.make_v1 import CODES, FLOAT8, PLAIN, elements
from statehold.tensors.dtypes import dtype_of
from support.faults import SMALL

GOLDEN = Path(__file__).parent / "v1"
DTYPES = [*CODES, "BF16", "C64", *FLOAT8]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    model = Tied()
    state: dict[str, Any] = {
        "dtypes": {code: torch.empty(2, 3, dtype=dtype_of(code, code)) for code in DTYPES},
        "shapes": {
            "scalar": torch.empty(()),
            "empty": torch.empty(0, 3),
            "empty bytes": torch.empty(0, dtype=torch.uint8),
            "odd bytes": torch.empty(5, dtype=torch.uint8),
        },
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "plain": {},
        "torch": {},
        "array": numpy.zeros(3, numpy.int64),
    }
    with statehold.Checkpointer(GOLDEN, **SMALL) as ckpt:
        got = ckpt.restore(state, 7)
        assert got == 7
        assert ckpt.steps() == [7, 8]
    return state


@pytest.mark.parametrize("code", DTYPES)
def test_tensors_of_every_dtype(state: dict[str, Any], code: str) -> None:
    assert raw(state["dtypes"][code]) == elements(code, 6)


def test_tensors_of_every_shape(state: dict[str, Any]) -> None:
    shapes = state["shapes"]
    assert shapes["scalar"].item() == struct.unpack("<f", elements("F32", 1))[0]
    assert raw(shapes["odd bytes"]) == elements("U8", 5)
    assert shapes["empty"].shape == (0, 3)
    assert state["array"].tobytes() == elements("I64", 3)


def test_a_tied_model_and_its_optimizer(state: dict[str, Any]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert model.head.weight is model.embed.weight
    assert raw(model.embed.weight) == elements("BF16", 32)
    [(parameter, moments)] = optimizer.state.items()
    assert parameter is model.embed.weight
    assert set(moments) == {"step", "exp_avg"}
    assert raw(moments["step"]) == elements("F32", 1)
    assert raw(moments["exp_avg"]) == elements("F32", 32)
    assert optimizer.param_groups[0]["lr"] == 0.001
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values(state: dict[str, Any], name: str) -> None:
    value = state["plain"][name]
    assert type(value) is type(PLAIN[name])
    if isinstance(value, set | frozenset):
        assert value == PLAIN[name]
    else:
        assert repr(value) == repr(PLAIN[name])


def test_values_of_torch_and_numpy(state: dict[str, Any]) -> None:
    values = state["torch"]
    assert values["dtype"] is torch.bfloat16
    assert values["device"] == torch.device("cpu")
    assert values["size"] == torch.Size([2, 3])
    assert isinstance(values["size"], torch.Size)
    assert values["numpy scalar"] == numpy.float64(1.5)
    assert type(values["numpy scalar"]) is numpy.float64


def test_dtypes_that_this_torch_lacks_are_refused() -> None:
    with (
        statehold.Checkpointer(GOLDEN, **SMALL) as ckpt,
        pytest.raises(statehold.errors.UnsupportedValueError) as caught,
    ):
        ckpt.restore({"rare": {}}, 8)
    assert caught.value.facts["dtype"].startswith(("F4", "F6"))
