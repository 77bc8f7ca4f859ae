"""Uninitialized parameters and buffers: a restore gives them the saved shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from statehold.errors import StateMismatchError
from support.matching import MemoryStep


def model(is_fresh: bool) -> nn.Module:
    if is_fresh:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def test_they_are_materialized() -> None:
    saved, live = model(False), model(True)
    saved(torch.randn(5, 4))
    weight, mean = live[0].weight, live[1].running_mean
    step = MemoryStep({"m": saved})
    report = step.restore({"m": live}).report
    assert live[0].weight is weight
    assert live[1].running_mean is mean
    assert type(weight) is nn.Parameter
    assert len(report.loaded) == 7
    assert all(
        torch.equal(value, saved.state_dict()[name]) for name, value in live.state_dict().items()
    )
    saved.eval(), live.eval()
    inputs = torch.randn(2, 4)
    assert torch.equal(live(inputs), saved(inputs))
    assert type(live[0]) is nn.Linear


def test_nothing_is_materialized_before_all_fits() -> None:
    live: dict[str, Any] = {"m": model(True), "t": torch.ones(2)}
    with pytest.raises(StateMismatchError):
        MemoryStep({"m": model(False), "t": torch.ones(3)}).prepare(live)
    step = MemoryStep({"m": model(False), "t": torch.ones(2)})
    step.prepare(live)
    assert is_lazy(live["m"][0].weight)


def test_of_another_dtype_they_are_a_mismatch() -> None:
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"m": nn.Linear(4, 3).double()}).prepare({"m": nn.LazyLinear(3)})
    expected = "expected float32 of any shape, as it is uninitialized, got F64 [3, 4] in the step"
    assert caught.value.facts["m.weight"] == expected


def test_what_the_step_lacks_is_named() -> None:
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"m": nn.Linear(4, 3, bias=False)}).prepare({"m": nn.LazyLinear(3)})
    assert "an uninitialized tensor of float32" in caught.value.facts["m.bias"]


def test_tied_ones_stay_tied() -> None:
    def tied(kind: Any) -> nn.Module:
        module = nn.Module()
        module.one, module.other = kind(), kind()
        module.other.weight = module.one.weight
        return module

    saved = tied(lambda: nn.Linear(4, 3))
    live = tied(lambda: nn.LazyLinear(3))
    MemoryStep({"m": saved}).restore({"m": live})
    assert live.one.weight is live.other.weight
    assert torch.equal(live.one.weight, saved.one.weight)
