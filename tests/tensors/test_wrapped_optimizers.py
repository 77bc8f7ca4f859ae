"""Optimizers behind wrappers, and those with a state_dict() of their own: names and contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from statehold.errors import StateMismatchError
from statehold.format.selection import Selection
from statehold.tensors.kinds import optimizers
from support.matching import MemoryStep, eager
from support.wrapped import (
    Extra,
    Flat,
    FlatByName,
    Holder,
    Hooked,
    Imitating,
    Subclassing,
    Translating,
)

PASSING_ON: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "a subclass that delegates": Subclassing,
    "a class made at run time": Imitating,
    "no optimizer at all": Holder,
    "twice": lambda inner: Imitating(Subclassing(inner)),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def stepped(part: nn.Module, optimizer: Any, count: int = 2) -> Any:
    for _ in range(count):
        for parameter in part.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
    return optimizer


def run(wrap: Callable[[Any], Any], lr: float = 0.1) -> tuple[nn.Module, Any]:
    part = model()
    return part, wrap(torch.optim.AdamW(part.parameters(), lr))


def content(optimizer: Any) -> Any:
    inner = optimizers.of(optimizer)
    assert inner is not None
    return [
        [{key: value.tolist() for key, value in inner.state[p].items()} for p in group["params"]]
        + [group["lr"]]
        for group in inner.param_groups
    ]


def as_it_is(inner: Any) -> Any:
    return inner


@pytest.mark.parametrize("wrap", PASSING_ON.values(), ids=PASSING_ON)
def test_names_are_those_of_the_optimizer_inside(wrap: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    part, optimizer = run(wrap)
    stepped(part, optimizer)
    step = MemoryStep({"m": part, "o": optimizer})
    bare = MemoryStep({"m": part, "o": optimizers.of(optimizer)})
    assert step.manifest.state == bare.manifest.state
    assert "o.state.m.0.weight.exp_avg" in step.manifest.tensors
    assert not eager({"m": part, "o": optimizer})


@pytest.mark.thorough
@pytest.mark.parametrize("wrap", PASSING_ON.values(), ids=PASSING_ON)
@pytest.mark.parametrize("saved_bare", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_step_with_the_wrapper_restores_without(
    wrap: Callable[[Any], Any], saved_bare: bool, fresh: bool
) -> None:
    save, load = (as_it_is, wrap) if saved_bare else (wrap, as_it_is)
    part, optimizer = run(save, 0.5)
    stepped(part, optimizer)
    step = MemoryStep({"m": part, "o": optimizer})
    other, target = run(load)
    if not fresh:
        stepped(other, target, 1)
    state = {"m": other, "o": target}
    report = step.restore(state).report
    assert state["o"] is target
    assert (report.missing, report.unexpected) == ((), ())
    assert content(target) == content(optimizer)
    stepped(other, target), stepped(part, optimizer)
    assert content(target) == content(optimizer)


OWN: dict[str, Callable[[Any], Any]] = {"hooks": Hooked.on, "a translation": Translating.of}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.parametrize("saved_bare", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
def test_own_state_dicts_and_names_are_translated(
    own: Callable[[Any], Any], saved_bare: bool, fresh: bool
) -> None:
    save, load = (as_it_is, own) if saved_bare else (own, as_it_is)
    part, optimizer = run(save, 0.5)
    stepped(part, optimizer)
    step = MemoryStep({"m": part, "o": optimizer})
    other, target = run(load)
    if not fresh:
        stepped(other, target, 1)
    step.restore({"m": other, "o": target})
    assert content(target) == content(optimizer)
    if saved_bare:
        assert Hooked.loads(target) == 1


def test_flat_names_on_both_sides_are_handed_over_as_they_are() -> None:
    def started(lr: float) -> tuple[nn.Module, FlatByName]:
        part = model()
        return part, FlatByName(part.parameters(), lr)

    part, optimizer = started(0.5)
    step = MemoryStep({"m": part, "o": stepped(part, optimizer)})
    other, target = started(0.1)
    step.restore({"m": other, "o": stepped(other, target, 1)})
    assert content(target) == content(optimizer)


def test_what_a_wrapper_keeps_itself_is_saved() -> None:
    part, optimizer = run(Extra)
    optimizer.scale = 8.0
    step = MemoryStep({"m": part, "o": stepped(part, optimizer)})
    assert step.manifest.state["o"]["scale"] == 8.0
    other, target = run(Extra)
    step.restore({"m": other, "o": target})
    assert target.scale == 8.0
    assert content(target.inner) == content(optimizer.inner)


def test_what_the_step_lacks_of_a_wrapper_is_missing() -> None:
    part, optimizer = run(as_it_is)
    step = MemoryStep({"m": part, "o": stepped(part, optimizer)})
    other, target = run(Extra)
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"m": other, "o": target})
    assert list(caught.value.facts) == ["o.scale"]
    report = step.restore({"m": other, "o": target}, selection=Selection(strict=False)).report
    assert report.missing == ("o.scale",)
    assert target.scale == 1.0
    assert content(target.inner) == content(optimizer)


def test_a_form_without_places_is_refused_for_names() -> None:
    part, optimizer = run(as_it_is)
    step = MemoryStep({"m": part, "o": stepped(part, optimizer)})
    other, target = run(Flat)
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"m": other, "o": target})
    assert "by the names of its parameters" in caught.value.facts["o"]


def test_groups_of_other_sizes_are_refused_before_anything_changes() -> None:
    part, optimizer = run(Hooked.on)
    step = MemoryStep({"m": part, "o": stepped(part, optimizer)})
    other = model()
    target = torch.optim.AdamW(list(other.parameters())[1:])
    with pytest.raises(StateMismatchError) as caught:
        step.prepare({"m": other, "o": target})
    assert (
        caught.value.facts["o.param_groups"] == "expected groups of 3, got groups of 4 in the step"
    )


@pytest.mark.filterwarnings("ignore")
def test_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    check_framework(lambda part, optimizer: accelerator.prepare(optimizer))


@pytest.mark.filterwarnings("ignore")
def test_of_lightning_fabric() -> None:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    check_framework(lambda part, optimizer: fabric.setup(part, optimizer)[1])


def check_framework(wrap: Callable[[nn.Module, Any], Any]) -> None:
    part = model()
    inner = torch.optim.AdamW(part.parameters(), 0.5)
    optimizer = wrap(part, inner)
    assert type(optimizer) is not type(inner)
    stepped(part, inner)
    step = MemoryStep({"m": part, "o": optimizer})
    assert "o.state.m.0.weight.exp_avg" in step.manifest.tensors
    other = model()
    target = torch.optim.AdamW(other.parameters())
    step.restore({"m": other, "o": target})
    assert content(target) == content(inner)
    third = model()
    wrapped = wrap(third, torch.optim.AdamW(third.parameters()))
    step.restore({"m": third, "o": wrapped})
    assert content(wrapped) == content(inner)
