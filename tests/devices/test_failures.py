"""A device that fails: what is said, what comes back, and what still works without it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import statehold
from devices.conftest import trained_on, training_on
from statehold.errors import DeviceError
from statehold.tensors import captured
from statehold.tensors.devices.copying import DeviceCopies
from support.cuda import Machine, copies_of
from support.faults import DEADLINE_S, must

# A buffer that is waited for is asked after, or waited for, as it comes.
OPERATIONS = [("a launch",), ("cudaEventRecord",), ("cudaEventSynchronize", "cudaEventQuery")]


def fail_when(machine: Machine, wanted: tuple[str, ...], after: int = 0) -> None:
    """Have the device fail at a use of the runtime by statehold's own threads."""
    left = after

    def fails(operation: str) -> bool:
        nonlocal left
        if operation in wanted and machine.is_on_own_thread():
            left -= 1
        return left < 0

    machine.fails_at = fails


@pytest.mark.thorough
@pytest.mark.parametrize("wanted", OPERATIONS, ids="-".join)
@pytest.mark.parametrize("after", [0, 2])
def test_a_save_says_so_and_gives_every_buffer_back(
    ckpt: statehold.Checkpointer, machine: Machine, wanted: tuple[str, ...], after: int
) -> None:
    training = trained_on(machine, width=1024)  # many times the staging memory
    host = {"w": torch.randn(1 << 20)}  # needs every buffer
    ckpt.save(1, host).wait("committed", DEADLINE_S)
    machine.finish()
    fail_when(machine, wanted, after)
    with pytest.raises(DeviceError, match="a device failed") as caught:
        ckpt.save(2, {"model": training.model}).wait("committed", DEADLINE_S)
    assert machine.failure
    assert "illegal memory access" in caught.value.facts["cause"]
    assert caught.value.facts["still safe"] == "step 1 and older"
    assert "please report" not in caught.value.hint
    for step in (3, 4):
        ckpt.save(step, host).wait("committed", DEADLINE_S)
    assert ckpt.steps()[-1] == 4


@pytest.mark.parametrize("mark", [statehold.Gated, statehold.Volatile])
def test_a_save_on_a_device_that_has_failed(
    ckpt: statehold.Checkpointer, machine: Machine, mark: Any
) -> None:
    weights = machine.put(torch.ones(8))
    machine.failure = "CUDA error: device-side assert triggered"
    with pytest.raises(DeviceError, match="a device failed"):
        ckpt.save(1, {"w": mark(weights)})
    assert ckpt.steps() == []
    ckpt.save(2, {"host": torch.ones(8)}).wait("committed", DEADLINE_S)


class Gathered:
    """Its state takes more memory of a device than there is."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def state_dict(self) -> dict[str, Any]:
        return {"all": torch.cat([self._weights] * 8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights.copy_(state["all"][: len(self._weights)])


def test_a_state_dict_without_memory_raises_what_torch_says(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    """The device has not failed."""
    weights = machine.put(torch.ones(8))
    machine.memory.limits[0] = machine.bytes_on()
    with pytest.raises(torch.OutOfMemoryError):
        ckpt.save(1, {"w": Gathered(weights)})
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)


def test_the_gate_opens_when_the_device_fails_behind_the_copies(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    """Not somebody's step() raises it, which may be that of a model on the host."""
    training = trained_on(machine)
    machine.timeline.may_finish.clear()
    ckpt.save(1, {"model": training.model})
    must(copies_of(ckpt).enqueued.wait(DEADLINE_S))
    machine.failure = "CUDA error: unspecified launch failure"
    machine.timeline.may_finish.set()
    ckpt.gate(DEADLINE_S)
    with pytest.raises(DeviceError, match="a device failed"):
        ckpt.save(2, {"host": torch.ones(8)})
    assert ckpt.steps() == []


def test_a_device_that_fails_while_save_waits_for_eager_copies(
    ckpt: statehold.Checkpointer, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "CLONED_BYTES_MAX", 0)
    weights = machine.put(torch.ones(8))
    wait_eager, fired = DeviceCopies.wait_eager, []

    def fail(copies: DeviceCopies) -> None:
        must(copies.eager_under_way.wait(DEADLINE_S))
        machine.failure = "CUDA error: unspecified launch failure"
        fired.append(True)
        wait_eager(copies)

    monkeypatch.setattr(DeviceCopies, "wait_eager", fail)
    with pytest.raises(DeviceError, match="a device failed"):
        ckpt.save(1, {"w": weights})
    assert fired


def test_a_restore_says_so_and_gives_every_buffer_back(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = training_on(machine, width=1024)
    ckpt.save(1, {"model": training.model}).wait("committed", DEADLINE_S)
    machine.finish()
    machine.fails_at = lambda operation: operation == "cudaEventSynchronize"
    with pytest.raises(DeviceError, match="a device failed"):
        ckpt.restore({"model": training.model}, 1)
    assert machine.failure
    host = {"w": torch.randn(1 << 20)}
    ckpt.save(2, host).wait("committed", DEADLINE_S)


def test_closing_after_a_failure_reports_nothing_more(
    ckpt: statehold.Checkpointer, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    training = trained_on(machine)
    ckpt.save(1, {"model": training.model}).wait("committed", DEADLINE_S)
    machine.failure = "CUDA error: unspecified launch failure"
    caplog.set_level(logging.WARNING)
    ckpt.close()
    assert not caplog.records
