"""A step() with a closure never tears a save, whatever changes parameters around the closure.

The changes here move no version counter: only the gate keeps them away from the bytes of a save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import statehold
from checkpointer.test_torn import releasing
from support.faults import DEADLINE_S, Holdup
from support.inside import passage

WIDE = 1024  # 4 MiB, twice the staging memory


def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(0.5)


class Direct(torch.optim.Optimizer):
    """An optimizer of somebody else; it changes its parameters through .data."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Callable[..., Any]) -> Any:
        result = closure(scale=1)
        decay(self)
        return result


class Held:
    """A model, and a save of it that is held up until somebody waits for it."""

    def __init__(self, ckpt: statehold.Checkpointer, holdup: Holdup) -> None:
        self._ckpt, self._holdup = ckpt, holdup
        self.model = nn.Linear(WIDE, WIDE)

    def save(self) -> None:
        self.expected = self.model.weight.detach().clone()
        self._save = self._ckpt.save(1, {"model": self.model})
        assert not self._save.done("staged")
        passage(self._save).wait_ended = releasing(self._holdup, passage(self._save).wait_ended)

    def closure(self, scale: float = 1) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.model(torch.ones(1, WIDE)).sum() * scale
            loss.backward()
        return loss

    def saving_closure(self, scale: float = 1) -> torch.Tensor:
        self.save()
        return self.closure(scale)

    def check(self) -> None:
        self._save.wait("committed", DEADLINE_S)
        assert not torch.equal(self.model.weight, self.expected)
        self._ckpt.restore({"model": self.model})
        assert torch.equal(self.model.weight, self.expected)


@pytest.fixture
def held(small_ckpt: statehold.Checkpointer, holdup: Holdup) -> Held:
    return Held(small_ckpt, holdup)


@pytest.fixture
def hooked_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Asked for before any Checkpointer, so that its hook of all optimizers is the first."""
    handle = register_optimizer_step_pre_hook(decay)
    yield
    handle.remove()


def fused(held: Held) -> torch.optim.Optimizer:
    return torch.optim.SGD(held.model.parameters(), lr=0.1, fused=True)


def test_a_hook_of_the_optimizer(held: Held) -> None:
    held.optimizer = fused(held)
    held.optimizer.register_step_pre_hook(decay)
    held.save()
    held.optimizer.step(held.closure)
    held.check()


@pytest.mark.parametrize("closes", [False, True])
def test_a_hook_of_all_optimizers(hooked_before: None, held: Held, closes: bool) -> None:
    held.optimizer = fused(held)
    held.closure()
    held.save()
    held.optimizer.step(*[held.closure][:closes])
    held.check()


def test_a_hook_of_all_optimizers_that_comes_later(held: Held) -> None:
    held.optimizer = fused(held)
    held.save()
    handle = register_optimizer_step_pre_hook(decay)
    try:
        held.optimizer.step(held.closure)
    finally:
        handle.remove()
    held.check()


def test_a_class_of_torch_whose_step_was_replaced(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.optimizer = fused(held)
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def step(self: torch.optim.SGD, closure: Any = None) -> Any:
        decay(self)
        return original.__wrapped__(self, closure)

    replaced = torch.optim.Optimizer.profile_hook_step(step)
    replaced.hooked = True
    monkeypatch.setattr(torch.optim.SGD, "step", replaced)
    held.save()
    held.optimizer.step(held.closure)
    held.check()


@pytest.mark.parametrize("kind", [Direct, functools.partial(torch.optim.SGD, fused=True)])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_save_inside_the_closure(held: Held, kind: Callable[..., Any], by_name: bool) -> None:
    held.optimizer = kind(held.model.parameters(), lr=0.1)
    if by_name:
        held.optimizer.step(closure=held.saving_closure)
    else:
        held.optimizer.step(held.saving_closure)
    held.check()


def test_another_optimizer_inside_the_closure(held: Held) -> None:
    held.optimizer, inner = fused(held), fused(held)

    def closure() -> torch.Tensor:
        loss = held.closure()
        inner.step()
        return loss

    held.save()
    held.optimizer.step(closure)
    held.check()


def test_lbfgs_changes_parameters_between_its_closures(held: Held) -> None:
    held.optimizer = torch.optim.LBFGS(held.model.parameters(), max_iter=3)
    held.save()
    held.optimizer.step(held.closure)
    held.check()


def test_what_is_no_closure_reaches_a_step_as_it_is(held: Held) -> None:
    class Scaled(Direct):
        def step(self, scale: Any) -> Any:
            return scale

    given = nn.Linear(1, 1)
    held.optimizer = Scaled(held.model.parameters(), lr=0.1)
    held.save()
    assert held.optimizer.step(given) is given
    assert held._save.done("staged")
