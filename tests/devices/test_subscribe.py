"""Updates of tensors on a device: through pinned memory, in the order of the consumer's stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import statehold
from devices.conftest import training_on
from support.cuda import Machine
from support.faults import DEADLINE_S, SMALL
from support.training import Training


def applied(updates: statehold.Subscription) -> statehold.Update:
    update = updates.wait(DEADLINE_S)
    assert update is not None
    update.apply()
    return update


def weights(machine: Machine, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with machine.still():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_model_on_a_device_has_whole_steps(tmp_path: Path, machine: Machine) -> None:
    training, served = Training(seed=0), training_on(machine, seed=1)
    with (
        statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt,
        statehold.subscribe(tmp_path / "run", {"model": served.model}) as updates,
    ):
        for step in (1, 2, 3):
            training.step()
            ckpt.save(step, training.state).wait("committed", DEADLINE_S)
            update = applied(updates)
            assert update.step == step
            expected = training.model.state_dict()
            found = weights(machine, served.model)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert step == 1 or machine.pins.ranges
            assert not machine.pins.forked()
    pinned = [what for what, _ in machine.pins.calls]
    assert pinned.count("pin") == pinned.count("unpin") > 0


def test_strided_tensors_and_columns_on_a_device(tmp_path: Path, machine: Machine) -> None:
    saved = torch.arange(96.0).view(8, 12)
    there = {"strided": machine.put(torch.zeros(12, 8)).t(), "here": torch.zeros(8, 12)}
    with (
        statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt,
        statehold.subscribe(tmp_path / "run", {"model": there}) as updates,
    ):
        for step in (1, 2):
            saved.add_(1)
            ckpt.save(step, {"model": {"strided": saved, "here": saved}}).wait()
            applied(updates)
            with machine.still():
                assert torch.equal(there["strided"].clone(), saved)
            assert torch.equal(there["here"], saved)


def test_a_device_without_memory_leaves_the_old_step(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch memory is taken before the first tensor changes."""
    from statehold.subscription import subscribe

    plain = machine.put(torch.zeros(8, 12))
    there = {"a": plain, "b": machine.put(torch.zeros(12, 8)).t()}
    state = {"model": {"a": torch.ones(8, 12), "b": torch.ones(8, 12)}}
    with (
        statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt,
        statehold.subscribe(tmp_path / "run", {"model": there}) as updates,
    ):
        ckpt.save(1, state).wait()
        update = updates.wait(DEADLINE_S)
        assert update is not None
        with monkeypatch.context() as patch:

            def full(*_: object) -> torch.Tensor:
                raise torch.OutOfMemoryError("injected")

            patch.setattr(subscribe, "_beside", full)
            with pytest.raises(torch.OutOfMemoryError, match="injected"):
                update.apply()
        with machine.still():
            assert not plain.clone().any()
        applied(updates)
        with machine.still():
            assert plain.clone().all()
