"""torchao's own classes, where it is installed: optimizers of few bits, and quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import UnsupportedValueError
from support.faults import SMALL
from support.matching import MemoryStep

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps as they are written: compiling them takes minutes."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_go_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    build = getattr(pytest.importorskip("torchao.optim"), name)

    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(128, 128)
        return {"m": model, "o": build(model.parameters(), 1e-3), "rng": statehold.Rng()}

    def steps(state: dict[str, Any]) -> list[float]:
        losses = []
        for _ in range(3):
            loss = state["m"](torch.randn(4, 128)).square().mean()
            loss.backward()
            state["o"].step()
            state["o"].zero_grad()
            losses.append(loss.item())
        return losses

    state = made()
    steps(state)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(3, state).wait("committed")
    expected, resumed = steps(state), made()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        got = ckpt.restore(resumed)
    assert got == 3
    assert steps(resumed) == expected


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_quantized_weights(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        quantization.quantize_(model, getattr(quantization, name)())
        return model

    saved, live = made(), made()
    MemoryStep({"m": saved}).restore({"m": live})
    inputs = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(saved(inputs), live(inputs))


def test_what_is_not_plain_is_refused_by_name() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(UnsupportedValueError) as caught:
        MemoryStep({"m": model})
    assert caught.value.facts["path"].startswith("m.0.weight.<context>.")
