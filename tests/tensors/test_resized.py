"""Modules that resize their own tensors when they are loaded: what load_state_dict() takes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from statehold.errors import StateMismatchError
from support.matching import MemoryStep


class Book(nn.Module):
    """A code book that grows: a parameter and a buffer of as many rows as were saved."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.full((rows, 2), float(rows)))
        self.register_buffer("used", torch.full((rows,), rows))
        self.log: list[int] = []
        self.inside = nn.Linear(2, 2)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.log.append(len(state[f"{prefix}rows"]))
        self.rows.data = self.rows.data.new_empty(state[f"{prefix}rows"].shape)
        self.used.resize_(state[f"{prefix}used"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Clever(Book):
    """One that looks at the values, which are not there before they are read."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        assert state[f"{prefix}used"].sum().item() >= 0
        super()._load_from_state_dict(state, prefix, *rest)


class Hooked(nn.Module):
    """One with a hook, which reaches the module itself."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("used", torch.full((rows,), rows))
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: module.used.resize_(state[f"{prefix}used"].shape)
        )


def observed(train: bool) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = torch.ao.quantization
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model.train())
        if train:
            model(torch.randn(8, 4))
    return model


def bits(module: nn.Module) -> dict[str, Any]:
    return {name: (each.shape, each.tolist()) for name, each in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, torch.compile])
def test_a_fresh_module_takes_what_was_learned(wrap: Any) -> None:
    saved = nn.Sequential(observed(True), Book(5))
    saved[1].used.fill_(7)
    live = nn.Sequential(observed(False), Book(2))
    optimizer = torch.optim.SGD(live.parameters(), lr=1.0)
    step = MemoryStep({"model": saved})
    report = step.restore({"model": wrap(live)}).report
    assert bits(live) == bits(saved)
    assert "model.1.rows" in report.loaded
    assert optimizer.param_groups[0]["params"] == list(live.parameters())


@pytest.mark.parametrize("other", [nn.BatchNorm1d, lambda rows: nn.Linear(rows, 2), Clever, Hooked])
def test_nothing_changes_where_a_module_may_not_take_it(other: Any) -> None:
    step = MemoryStep({"a": {"model": nn.ModuleList([Book(5), other(5)])}})
    live = nn.ModuleList([Book(2), other(2)])
    before, log = bits(live), copy.copy(live[0].log)
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"a": {"model": live}})
    assert bits(live) == before
    assert live[0].log == log
    assert all(name.startswith("a.model.1.") for name in caught.value.facts)
    by_hand = 'load_state_dict(statehold.load("RUN@1", "a.model"))'
    assert (by_hand in caught.value.hint) == (other in (Clever, Hooked))
