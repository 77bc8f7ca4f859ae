"""accelerator_state: what it holds, what it refuses, and that a loop by hand reads its steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import UsageError

accelerate = pytest.importorskip("accelerate")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

from statehold.integrations.accelerate import accelerator_state  # noqa: E402

DATA = torch.randn(24, 8, generator=torch.Generator().manual_seed(7))


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.fixture(autouse=True)
def _no_shared_state() -> Iterator[None]:
    """Accelerators of one process share their state, and keep it."""
    yield
    reset()


def reset() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator(*, knows: bool = True) -> Any:
    config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=knows)
    return accelerate.Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=2)


def prepared(own: Any) -> dict[str, Any]:
    """Two models with an optimizer each, a scheduler, a loader and a registered object."""
    torch.manual_seed(0)
    one, two = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    first, second = torch.optim.AdamW(one.parameters()), torch.optim.SGD(two.parameters(), 0.1, 0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
    loader = stateful.StatefulDataLoader(DATA, batch_size=4, shuffle=True)
    names = ["one", "two", "first", "second", "scheduler", "loader"]
    found = own.prepare(one, two, first, second, scheduler, loader)
    counter = Counter()
    own.register_for_checkpointing(counter)
    return {**dict(zip(names, found, strict=True)), "counter": counter}


def train(own: Any, parts: dict[str, Any], batches: Iterator[Any], count: int) -> list[float]:
    losses = []
    for batch in itertools.islice(batches, count):
        with own.accumulate(parts["one"], parts["two"]):
            loss = (parts["two"](parts["one"](batch)) - batch).pow(2).mean()
            own.backward(loss)
            for name in ("first", "second", "scheduler"):
                parts[name].step()
            for name in ("first", "second"):
                parts[name].zero_grad()
        parts["counter"].count += 1
        losses.append(loss.item())
    return losses


def test_everything_that_is_prepared_or_registered_goes_on(tmp_path: Path) -> None:
    own = accelerator()
    parts = prepared(own)
    batches = iter(parts["loader"])
    train(own, parts, batches, 2)
    with statehold.Checkpointer(tmp_path / "run", staging_bytes="64MiB") as ckpt:
        ckpt.save(1, accelerator_state(own)).wait("committed")
    whole = train(own, parts, batches, 3)  # on in the epoch, and on in the accumulation
    assert parts["counter"].count == 5

    reset()
    own = accelerator()
    parts = prepared(own)
    torch.manual_seed(99)
    with statehold.Checkpointer(tmp_path / "run", staging_bytes="64MiB") as ckpt:
        assert ckpt.restore(accelerator_state(own)) == 1
    assert train(own, parts, iter(parts["loader"]), 3) == whole
    assert parts["counter"].count == 5


def test_a_loop_by_hand_restores_the_step(tmp_path: Path) -> None:
    own = accelerator()
    parts = prepared(own)
    train(own, parts, iter(parts["loader"]), 2)
    with statehold.Checkpointer(tmp_path / "run", staging_bytes="64MiB") as ckpt:
        ckpt.save(1, accelerator_state(own)).wait("committed")
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        ckpt.restore({"model": model, "optimizer": optimizer}, only=["model", "optimizer"])
    assert torch.equal(model.weight, own.unwrap_model(parts["one"]).weight)
    assert optimizer.state[model.weight]["step"] == 1


def test_a_loader_without_a_position_is_refused() -> None:
    own = accelerator(knows=False)
    parts = prepared(own)
    with pytest.raises(UsageError, match="does not know its position"):
        accelerator_state(own)
    assert "data" not in accelerator_state(own, loaders=[])
    assert parts["counter"] is accelerator_state(own, loaders=[])["custom"]


def evaluated(run: Path, steps: int) -> list[float]:
    """The losses of a loop with dropout that evaluates after each step, with a prepared loader."""
    reset()
    own = accelerator()
    parts = prepared(own)
    held_out = own.prepare(stateful.StatefulDataLoader(DATA[:8], batch_size=4))
    losses = []
    with statehold.Checkpointer(run, staging_bytes="64MiB") as ckpt:
        state = accelerator_state(own, loaders=[parts["loader"]])
        step = ckpt.restore(state) or 0
        while step < steps:
            for batch in parts["loader"]:
                losses += train(own, parts, iter([batch]), 1)
                if own.sync_gradients:
                    step += 1
                    for held in held_out:
                        parts["one"](held)
                    ckpt.save(step, state)
                if step == steps:
                    break
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 2, 3])
def test_evaluations_draw_the_same_numbers_after_a_restore(tmp_path: Path, step: int) -> None:
    whole = evaluated(tmp_path / "whole", 5)
    evaluated(tmp_path / "cut", step)
    assert evaluated(tmp_path / "cut", 5) == whole[2 * step :]
