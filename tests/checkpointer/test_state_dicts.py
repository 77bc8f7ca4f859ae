"""State dicts handed over in place of the objects: what is copied lazily, and that it is safe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import TornSnapshot
from support.faults import DEADLINE_S, SMALL

WIDE = 1024
MATRIX_BYTES = 4 * WIDE * WIDE  # twice the staging memory of SMALL
MOMENTS_BYTES = 2 * (MATRIX_BYTES + 4 * WIDE)


class Run:
    """A model and an optimizer, saved as their state dicts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(WIDE, WIDE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)

    def step(self) -> None:
        self.model(torch.ones(1, WIDE)).sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def moment(self) -> torch.Tensor:
        found: torch.Tensor = self.optimizer.state[self.model.weight]["exp_avg"]
        return found


@pytest.fixture
def trained(small_ckpt: statehold.Checkpointer) -> Run:
    """It has stepped since the Checkpointer was opened."""
    small_ckpt.steps()
    run = Run()
    run.step()
    return run


def total(state: dict[str, Any]) -> int:
    moments = [value for each in state["optimizer"]["state"].values() for value in each.values()]
    return sum(each.nbytes for each in [*state["model"].values(), *moments])


def test_the_state_of_a_stepping_optimizer_is_lazy(
    small_ckpt: statehold.Checkpointer, trained: Run
) -> None:
    state = trained.state
    stats = small_ckpt.save(1, state).wait("committed", DEADLINE_S).stats
    assert stats.state_bytes == total(state)
    assert stats.eager_bytes == sum(each.nbytes for each in state["model"].values())


def test_without_an_update_since_the_last_save_nothing_is_known(
    small_ckpt: statehold.Checkpointer, trained: Run
) -> None:
    """As of an optimizer that is replayed as a CUDA graph: its step() is called no more."""
    for step in (1, 2):
        stats = small_ckpt.save(step, trained.state).wait("committed", DEADLINE_S).stats
    assert stats.eager_bytes == stats.state_bytes
    trained.step()
    stats = small_ckpt.save(3, trained.state).wait("committed", DEADLINE_S).stats
    assert stats.eager_bytes == stats.state_bytes - MOMENTS_BYTES - 8


def test_what_was_saved_is_the_state_at_the_call(
    small_ckpt: statehold.Checkpointer, trained: Run
) -> None:
    """Weights are swapped behind autograd's back once save() has returned, as averages of weights
    are for an evaluation; the moments change at the next step, which waits."""
    expected = {name: value.clone() for name, value in trained.model.state_dict().items()}
    moment = trained.moment.clone()
    small_ckpt.save(1, trained.state)
    trained.model.weight.data.copy_(torch.zeros(WIDE, WIDE))
    trained.step()
    assert not torch.equal(trained.moment, moment)
    fresh = Run()
    fresh.step()
    saved = fresh.state
    small_ckpt.restore(saved)
    assert torch.equal(saved["model"]["weight"], expected["weight"])
    assert torch.equal(saved["optimizer"]["state"][0]["exp_avg"], moment)


def test_a_moment_that_changes_past_the_gate_fails_the_save(
    small_ckpt: statehold.Checkpointer, trained: Run, holdup: Any
) -> None:
    state = {"optimizer": trained.optimizer.state_dict()}
    save = small_ckpt.save(1, state)
    assert not save.done("staged")
    trained.moment.mul_(0.5)
    holdup.release()
    with pytest.raises(TornSnapshot) as caught:
        save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "optimizer.state.0.exp_avg"
    assert small_ckpt.steps() == []


def test_handing_over_parameters_by_their_state_dict_is_told_once(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statehold.tensors.captured.TOLD_BYTES_MIN", MATRIX_BYTES)
    training = Run()
    with caplog.at_level(logging.INFO, "statehold"), statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in range(1, 4):
            training.step()
            ckpt.save(step, training.state).wait("committed", DEADLINE_S)
    [told] = [record for record in caplog.records if "the module itself" in record.getMessage()]
    assert told.levelno == logging.INFO
    assert "model.weight" in told.getMessage()
    assert "4 MiB" in told.getMessage()
