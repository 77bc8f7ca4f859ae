"""A save in the middle of an accumulation is warned of once; no other order of calls is."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn

import statehold
from statehold.tensors import updates
from support.faults import DEADLINE_S, SMALL

TOLD = "is saved while gradients wait for optimizer.step()"


class Loop:
    """A model and its optimizer, and what a loop may do with them."""

    def __init__(self, run: object, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = nn.Linear(3, 3)
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.ckpt = statehold.Checkpointer(run, **SMALL)
        self.ckpt.restore(self.state)
        self.step = 0

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()

    def save(self) -> None:
        self.step += 1
        self.ckpt.save(self.step, self.state).wait("committed", DEADLINE_S)


def before(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()
    loop.save()


def after(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.save()


def in_place(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    loop.optimizer.step()
    loop.save()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.save()


def accumulating(loop: Loop) -> None:
    for _ in range(3):
        loop.backward()
    loop.optimizer.step()
    loop.save()
    loop.optimizer.zero_grad()
    loop.save()


def clipping(loop: Loop) -> None:
    loop.backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()
    gc.collect()
    loop.save()
    loop.optimizer.zero_grad()


def closing(loop: Loop) -> None:
    def closure() -> float:
        loop.optimizer.zero_grad()
        loop.backward()
        return 0.0

    loop.optimizer.step(closure)
    loop.save()


@pytest.mark.thorough
@pytest.mark.parametrize("loop", [before, after, in_place, accumulating, clipping, closing])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_loops_without_a_warning(
    run, loop: Callable[[Loop], None], kind, caplog: pytest.LogCaptureFixture
) -> None:
    made = Loop(run, kind)
    with made.ckpt:
        for _ in range(3):
            loop(made)
    assert TOLD not in caplog.text


def test_another_models_loss_reaches_this_one(run, caplog: pytest.LogCaptureFixture) -> None:
    """As in a GAN: gradients that nobody uses are left in the discriminator."""
    critic = Loop(run / "critic")
    critic.ckpt.close()
    maker = Loop(run)
    with maker.ckpt:
        for step in range(1, 4):
            critic.optimizer.zero_grad()
            critic.backward()
            critic.optimizer.step()
            critic.optimizer.zero_grad()
            maker.optimizer.zero_grad()
            critic.model(maker.model(torch.ones(2, 3))).sum().backward()
            maker.optimizer.step()
            maker.ckpt.save(step, {**maker.state, "critic": critic.state})
    assert TOLD not in caplog.text


def test_an_accumulation_is_told_of_once(run, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(run)
    with loop.ckpt:
        loop.backward()
        loop.save()  # nobody has stepped: these may be of anything
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.save()
        assert TOLD not in caplog.text
        for _ in range(3):
            loop.backward()
            loop.save()
    assert caplog.text.count(TOLD) == 1
    assert "step 3 is saved while" in caplog.text


def test_a_closure_runs_before_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are in it, and they may overlap with copies."""
    order: list[str] = []
    monkeypatch.setattr(updates.hook, "action", None)
    monkeypatch.setattr(updates.hook, "handle", None)
    hooks = import_module("torch.optim.optimizer")
    monkeypatch.setattr(hooks, "_global_optimizer_pre_hooks", OrderedDict())
    updates.hook.put_on(lambda _: order.append("gate"))

    def closure() -> torch.Tensor:
        order.append("closure")
        loss = weight.square().sum()
        loss.backward()
        return loss

    try:
        for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS, Before):
            weight = nn.Parameter(torch.ones(2))
            order.clear()
            kind([weight], lr=0.1).step(closure)
            assert order[0] == ("gate" if kind is Before else "closure")
            assert order[order.index("closure") + 1] == "gate"
    finally:
        updates.hook.action = None


class Before(torch.optim.SGD):
    """May change anything before it calls the closure, as SAM does."""

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        return super().step(closure)
