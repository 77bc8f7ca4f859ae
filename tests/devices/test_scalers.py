"""Gradient scalers on a device: save() does not wait for their numbers, and the step has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import statehold
from devices.conftest import trained_on
from statehold.integrations.dcp import StorageReader, StorageWriter
from support.cuda import Machine
from support.faults import DEADLINE_S

SCALE = 1.1920928955078125e-07


def numbers(
    machine: Machine, scale: float = SCALE, tracker: int = 1999
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a scaler, on the device."""
    there = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    return machine.put(there[0]), machine.put(there[1])


def given(scaler: Any, scale: torch.Tensor, tracker: torch.Tensor) -> Any:
    """A scaler with these numbers, as after its first scale()."""
    scaler._scale, scaler._growth_tracker = scale, tracker
    return scaler


def used(machine: Machine, scaler: Any, *values: Any) -> Any:
    return given(scaler, *numbers(machine, *values))


class Own(GradScaler):
    """One that says in its own way what it has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 1}


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("beside", ["device", "host"])
def test_save_does_not_wait_and_the_step_has_the_numbers(
    ckpt: statehold.Checkpointer, machine: Machine, kind: Any, beside: str
) -> None:
    scale, tracker = numbers(machine)
    scaler = given(kind("cpu", growth_interval=7), scale, tracker)
    expected = scaler.state_dict()
    model = trained_on(machine).model if beside == "device" else torch.nn.Linear(4, 4)
    machine.timeline.host_waits.clear()
    machine.timeline.may_finish.clear()
    scale.mul_(2)  # late
    save = ckpt.save(1, {"model": model, "scaler": scaler})
    assert "MainThread" not in machine.timeline.host_waits
    with torch.no_grad():  # as update() does
        scale.fill_(3.0)
        tracker.zero_()
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)
    live = {"model": model, "scaler": used(machine, kind("cpu"), 5.0, 0)}
    ckpt.restore(live)
    restored = live["scaler"].state_dict()
    assert restored == {**expected, "scale": 2 * SCALE}
    assert {key: type(each) for key, each in restored.items()} == {
        key: type(each) for key, each in expected.items()
    }


def test_torch_waits_for_nothing_when_the_numbers_are_read(
    ckpt: statehold.Checkpointer, machine: Machine, reads: list[bool]
) -> None:
    scaler = used(machine, GradScaler("cpu"))
    ckpt.save(1, {"scaler": scaler}).wait("committed", DEADLINE_S)
    assert reads == [True, True]


@pytest.mark.parametrize("scale", [65536.0, float("inf"), SCALE])
def test_the_step_holds_what_state_dict_gives(
    ckpt: statehold.Checkpointer, machine: Machine, scale: float
) -> None:
    scaler = used(machine, GradScaler("cpu"), scale)
    state = {"scaler": scaler, "plain": {"scaler": scaler.state_dict()}}
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    live: dict[str, Any] = {"scaler": {}, "plain": {"scaler": {}}}
    ckpt.restore(live)
    assert live["scaler"] == live["plain"]["scaler"] == scaler.state_dict()


@pytest.mark.parametrize("kind", ["disabled", "unused", "subclass"])
def test_other_scalers_are_asked_for_their_state(
    ckpt: statehold.Checkpointer, machine: Machine, kind: str
) -> None:
    scaler = {
        "disabled": lambda: GradScaler("cpu", enabled=False),
        "unused": lambda: GradScaler("cpu", init_scale=9.0),
        "subclass": lambda: used(machine, Own("cpu")),
    }[kind]()
    ckpt.save(1, {"scaler": scaler, "w": machine.put(torch.ones(8))}).wait("committed", DEADLINE_S)
    live: dict[str, Any] = {"scaler": {}, "w": machine.put(torch.zeros(8))}
    ckpt.restore(live)
    assert live["scaler"] == scaler.state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_scaler_among_the_items_of_a_planner(tmp_path: Path, machine: Machine) -> None:
    """dcp asks what is at the top for its state_dict(). Of this one the planner gives itself."""
    scaler = used(machine, GradScaler("cpu"))
    path, live = str(tmp_path / "step"), {"below": {"scaler": None}}
    dcp.save({"below": {"scaler": scaler}}, storage_writer=StorageWriter(path), no_dist=True)
    dcp.load(live, storage_reader=StorageReader(path), no_dist=True)
    assert live["below"]["scaler"] == scaler.state_dict()


def test_a_device_that_fails_fails_the_save(ckpt: statehold.Checkpointer, machine: Machine) -> None:
    scaler = used(machine, GradScaler("cpu"))
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, {"scaler": scaler})
    machine.failure = "CUDA error: unspecified launch failure"
    machine.timeline.may_finish.set()
    with pytest.raises(statehold.errors.DeviceError):
        save.wait("committed", DEADLINE_S)
    assert ckpt.steps() == []
