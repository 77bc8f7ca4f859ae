"""Parts of a step: only, skip, rename, and what is not strict."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from statehold.errors import StateMismatchError
from statehold.format.selection import Selection
from support.matching import MemoryStep
from support.training import Training, bits


def trained(seed: int) -> Training:
    training = Training(seed)
    training.step()
    return training


def test_weights_only() -> None:
    saved, live = trained(0), trained(1)
    before = bits(live)
    report = MemoryStep(saved.state).restore(live.state, selection=Selection(["model"])).report
    after, expected = bits(live), bits(saved)
    weights = set(live.model.state_dict())
    for name, raw in after.items():
        assert raw == (expected if name in weights else before)[name], name
    assert set(report.loaded) == {f"model.{name}" for name in weights}
    assert report.kept == ("optimizer", "scheduler", "progress", "rng")


def test_parts_of_modules_and_optimizers() -> None:
    saved, live = trained(0), trained(1)
    weight, norm = live.model.hidden.weight, live.model.norm.weight.detach().clone()
    square = live.optimizer.state[weight]["exp_avg_sq"].clone()
    selection = Selection(skip=["model.norm", "*.exp_avg_sq", "optimizer.param_groups.0.lr"])
    live.optimizer.param_groups[0]["lr"] = 9.0
    live.model.norm.weight.data.add_(1)
    report = MemoryStep(saved.state).restore(live.state, selection=selection).report
    assert torch.equal(live.model.norm.weight, norm + 1)
    assert torch.equal(live.model.hidden.weight, saved.model.hidden.weight)
    ours, theirs = live.optimizer.state[weight], saved.optimizer.state[saved.model.hidden.weight]
    assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    assert torch.equal(ours["exp_avg_sq"], square)
    assert live.optimizer.param_groups[0]["lr"] == 9.0
    assert {"model.norm.weight", "optimizer.param_groups.0.lr"} <= set(report.kept)


def test_what_is_missing_or_unexpected_is_an_error_unless_told() -> None:
    saved = {"m": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), "x": 1, "y": 2}
    live: dict[str, Any] = {
        "m": nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)}),
        "x": 0,
        "z": 3,
    }
    step = MemoryStep(saved)
    with pytest.raises(StateMismatchError) as caught:
        step.prepare(live)
    names = {"m.b.weight", "m.b.bias", "m.c.weight", "m.c.bias", "y", "z"}
    assert caught.value.facts.keys() == names
    kept = live["m"]["c"].weight.detach().clone()
    report = step.restore(live, selection=Selection(strict=False)).report
    assert set(report.missing) == {"m.c.weight", "m.c.bias", "z"}
    assert set(report.unexpected) == {"m.b.weight", "m.b.bias", "y"}
    assert set(report.loaded) == {"m.a.weight", "m.a.bias", "x"}
    assert torch.equal(live["m"]["c"].weight, kept)
    assert torch.equal(live["m"]["a"].weight, saved["m"]["a"].weight)
    assert (live["x"], live["z"]) == (1, 3)


@pytest.mark.parametrize(
    "skip",
    [["m.b", "m.c", "d", "e", "o.state.m.b", "o.state.m.c"], ["*.b.*", "*.c.*", "d.*", "e.*"]],
)
def test_skip_covers_what_one_side_lacks(skip: list[str]) -> None:
    def made(own: str, entry: str) -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), own: nn.Linear(2, 2)})
        return {
            "m": model,
            "o": torch.optim.SGD(model.parameters()),
            entry: {"x": 1, "y": {"z": torch.ones(2)}},
        }

    step, live = MemoryStep(made("b", "d")), made("c", "e")
    step.restore(live, selection=Selection(skip=skip))
    assert live["e"]["x"] == 1
    with pytest.raises(StateMismatchError) as caught:
        step.prepare(live, selection=Selection(skip=skip[1:]))
    assert "m.b.weight" in caught.value.facts
    assert all(".b" in name for name in caught.value.facts)
    assert 'skip=["m.b.weight", ' in caught.value.hint
    assert "strict=False" in caught.value.hint


def test_shapes_have_to_fit_even_so() -> None:
    step = MemoryStep({"m": nn.Linear(2, 2)})
    with pytest.raises(StateMismatchError, match=r"m\.weight") as caught:
        step.prepare({"m": nn.Linear(2, 3)}, selection=Selection(strict=False))
    assert 'skip=["m.weight", "m.bias"]' in caught.value.hint
    assert "strict" not in caught.value.hint


def test_optimizer_state_of_new_parameters_stays() -> None:
    saved, live = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    optimizers = []
    for model in (saved, live):
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.5))
        model(torch.ones(2)).sum().backward()
        optimizers[-1].step()
    before = copy.deepcopy(optimizers[1].state[live.bias])
    step = MemoryStep({"m": saved, "o": optimizers[0]})
    report = step.restore({"m": live, "o": optimizers[1]}, selection=Selection(strict=False)).report
    assert report.missing == ("m.bias", "o.state.m.bias")
    assert torch.equal(optimizers[1].state[live.bias]["exp_avg"], before["exp_avg"])


def test_renamed() -> None:
    saved, live = trained(0), trained(1)
    step = MemoryStep({"train": {"net": saved.model}, "opt": saved.optimizer})
    rename = {"train.net": "model", "opt": "optimizer"}
    state = {"model": live.model, "optimizer": live.optimizer}
    step.restore(state, selection=Selection(rename=rename))
    ours, theirs = bits(live), bits(saved)
    assert all(ours[n] == theirs[n] for n in theirs if n not in ("scheduler", "progress", "rng"))


def test_a_part_of_a_module_under_another_name() -> None:
    class Encoder(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(2, 2))
            self.head = nn.Linear(2, 2)

    saved, live = Encoder("old"), Encoder("new")
    step = MemoryStep({"m": saved, "ema": {"w": torch.ones(2)}})
    into = torch.zeros(2)
    step.restore(
        {"m": live, "average": {"deep": {"w": into}}},
        selection=Selection(rename={"m.old": "m.new", "ema": "average.deep"}),
    )
    assert torch.equal(live.get_submodule("new").weight, saved.get_submodule("old").weight)
    assert torch.equal(into, torch.ones(2))


class Noted(nn.Linear):
    """One with a dict beside its tensors."""

    def __init__(self, note: int) -> None:
        super().__init__(2, 2)
        self.note = {"a": note}

    def get_extra_state(self) -> dict[str, int]:
        return self.note

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, torch.compile])
@pytest.mark.parametrize("rename", [{"m": "m.inner"}, {"m.0": "m.inner.0"}])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_module_is_found_in_a_wrapper(wrap: Any, rename: dict[str, str]) -> None:
    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        return optimizer

    saved, live = nn.Sequential(Noted(1)), nn.Sequential(Noted(2))
    step = MemoryStep({"m": saved, "o": optimizer_of(saved)})
    wrapper, optimizer = nn.ModuleDict({"inner": live}), optimizer_of(live)
    step.restore({"m": wrap(wrapper), "o": optimizer}, selection=Selection(rename=rename))
    assert torch.equal(live[0].weight, saved[0].weight)
    assert live[0].note == {"a": 1}


def test_averages_take_the_place_of_weights() -> None:
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    step = MemoryStep({"model": model, "ema": average})
    live = nn.Linear(2, 2)
    selection = Selection(only=["model"], rename={"ema": "model"})
    step.restore({"model": live}, selection=selection)
    assert torch.equal(live.weight, average.weight)


@pytest.mark.parametrize(
    ("live", "selection", "expected", "kept"),
    [
        ([], {"skip": ["hist.*"]}, [], ()),
        ([7], {"only": ["w", "hist.0"]}, [1], ()),
        ([7], {"skip": ["hist.2"]}, [1, 2], ()),
        ([7, 8], {"skip": ["hist.0"]}, [7, 2, 3], ("hist.0",)),
        ([9] * 5, {"skip": ["hist.3"]}, [1, 2, 3, 9], ("hist.3",)),
        ([9] * 5, {"skip": ["hist.4"]}, [1, 2, 3, 9, 9], ("hist.4",)),
        ([9] * 5, {}, [1, 2, 3], ()),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_items_that_are_skipped_stay(
    live: list[int],
    selection: dict[str, Any],
    expected: list[int],
    kept: tuple[str, ...],
    kind: Any,
) -> None:
    state = {"hist": kind(live), "w": torch.zeros(2)}
    saved = MemoryStep({"hist": kind([1, 2, 3]), "w": torch.ones(2)})
    restored = saved.restore(state, selection=Selection(**selection))
    assert state["hist"] == kind(expected)
    assert restored.report.kept == kept


def test_an_item_after_one_that_is_skipped_has_no_place() -> None:
    state = {"hist": [7]}
    with pytest.raises(StateMismatchError, match=r"hist\.2 .*the items before it"):
        MemoryStep({"hist": [1, 2, 3]}).restore(state, selection=Selection(skip=["hist.1"]))
    assert state["hist"] == [7]
