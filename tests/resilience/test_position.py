"""The position of a state that the program saves itself, at any place in the loop's body."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from resilience.jobs import Meeting, coordinated, replica
from resilience.replica import BATCH, MICROBATCHES, SAMPLES, SEED, data, model_of, weights
from statehold import Checkpointer
from statehold.errors import UsageError
from statehold.resilience import Replicas, Step
from statehold.resilience.position import Position

UNTIL, CUT = 6, 3
Save = Callable[[Step], object]


def replicas_of(meeting: Meeting, make: Callable[..., Any]) -> Replicas:
    model = model_of()
    return Replicas(
        model, make(model.parameters()), microbatches=MICROBATCHES, samples=SAMPLES, batch=BATCH,
        seed=SEED, coordinator=meeting.address,
    )  # fmt: skip


def train(
    replicas: Replicas, until: int, before: Save = id, after: Save = id
) -> tuple[list[int], int]:
    """Which steps there were, and the weights at the end."""
    model, optimizer = replicas.state["model"], replicas.state["optimizer"]
    numbers = []
    for step in replicas.steps(until):
        for microbatch in step:
            x = data()[microbatch.samples]
            microbatch.backward(nn.functional.mse_loss(model(x), x))
        before(step)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(step.number)
        after(step)
    return numbers, weights(model)


class ByHand(torch.optim.Optimizer):
    """Its step() runs past the hooks of torch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        del self._optimizer_step_pre_hooks

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each -= 0.1 * each.grad


ByHand.step.hooked = True  # type: ignore[attr-defined]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "plain": torch.optim.AdamW,
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "by hand": ByHand,
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_state_that_is_saved_by_hand_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, place: str
) -> None:
    """R15: before the update it is that of the step's beginning, and after it that of the next."""
    make = OPTIMIZERS[kind]
    with coordinated(1) as meeting, replicas_of(meeting, make) as whole:
        expected, end = train(whole, UNTIL)
    with coordinated(1) as meeting, Checkpointer(tmp_path / "run") as ckpt:
        with replicas_of(meeting, make) as first:
            at = {"before": 0, "after": 1}[place]

            def save(step: Step) -> None:
                assert first.state["replicas"].step == step.number + at
                ckpt.save(step.number + at, first.state).wait("committed")

            train(first, CUT, **{place: save})
        with replicas_of(meeting, make) as second:
            ckpt.restore(second.state)
            numbers, found = train(second, UNTIL)
    assert numbers == expected[CUT - 1 + at :]
    assert found == end


class Around(torch.optim.Optimizer):
    """Its step() is that of another one, as in Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step(closure)


def test_an_optimizer_may_step_inside_another_one() -> None:
    model = model_of()
    base = torch.optim.SGD(model.parameters(), 0.1)
    with coordinated(1) as meeting, Replicas(
        model, Around(base), microbatches=MICROBATCHES, samples=SAMPLES, batch=BATCH, seed=SEED,
        coordinator=meeting.address, state={"base": base},
    ) as replicas:  # fmt: skip
        assert train(replicas, UNTIL)[0] == list(range(UNTIL))


def test_an_update_that_was_left_in_its_middle_leaves_no_state_of_any_step() -> None:
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        model, optimizer = replicas.state["model"], replicas.state["optimizer"]
        position, before = replicas.state["replicas"], copy.deepcopy(model.state_dict())
        steps = replicas.steps(1)
        for microbatch in next(steps):
            microbatch.backward(model(data()[:1]).sum())
        handle = optimizer.register_step_pre_hook(fail)
        assert not position.is_torn
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert position.is_torn
        handle.remove()
        optimizer.step()  # it adds to what the first try has done
        assert position.is_torn
        position.load_state_dict(position.state_dict())
        model.load_state_dict(before)
        assert not position.is_torn


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("name", ["model", "optimizer", "replicas"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="taken") as refused:
        replica("127.0.0.1:1", state={name: nn.Linear(1, 1)})
    assert refused.value.facts["name"] == name


SCHEDULERS: list[Callable[..., Any]] = [
    lambda each: lr_scheduler.ExponentialLR(each, 0.5),
    lambda each: lr_scheduler.OneCycleLR(each, 0.1, 20),
    lambda each: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(each, 1)]),
    lambda each: lr_scheduler.SequentialLR(
        each, [lr_scheduler.LinearLR(each), lr_scheduler.StepLR(each, 1)], [1]
    ),
    lambda each: torch.optim.swa_utils.SWALR(each, 0.1),
    lr_scheduler.ReduceLROnPlateau,
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("holder", [lambda each: each, lambda each: [{"s": each}]])
def test_every_scheduler_counts_wherever_the_state_has_it(make: Any, holder: Any) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = make(optimizer)
    state = {"optimizer": optimizer, "more": holder(scheduler)}
    sums: Any = SimpleNamespace(state_dict=dict, load_state_dict=id)
    position = Position(None, sums, list(model.parameters()), state)  # type: ignore[arg-type]
    metrics = [0.5] if make is lr_scheduler.ReduceLROnPlateau else []
    for number in range(2):
        position.committed(number)
        optimizer.step()
        scheduler.step(*metrics)
        position.ended(number)
    position.committed(2)
    optimizer.step()
    position.go_back()
    assert position.is_torn
    position.close()
