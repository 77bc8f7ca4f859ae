"""How much device memory a save holds, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import statehold
from devices.conftest import trained_on
from support.cuda import Machine
from support.faults import DEADLINE_S, Holdup, must
from support.inside import inside


class Temporary:
    """Gives its state as a new device tensor, which only the save has."""

    def __init__(self, machine: Machine, value: torch.Tensor) -> None:
        self._machine, self._value = machine, value

    def state_dict(self) -> dict[str, Any]:
        return {"now": self._machine.put(self._value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._value = self._machine.read(state["now"])


@pytest.mark.parametrize("mark", [lambda value: value, statehold.Gated])
def test_device_memory_is_given_back_at_staged(
    ckpt: statehold.Checkpointer, machine: Machine, mark: Any
) -> None:
    training = trained_on(machine)
    holdup = Holdup(ckpt)
    temporary = Temporary(machine, torch.randn(1000))
    before = machine.bytes_on()
    save = ckpt.save(1, {**training.state, "temporary": mark(temporary)})
    save.wait("staged", DEADLINE_S)
    must(holdup.waiting.wait(DEADLINE_S))
    machine.finish()  # the timeline lets go of what it has done
    held = machine.bytes_on()
    holdup.release()
    assert held == before
    assert machine.peak_on() > before
    save.wait("committed", DEADLINE_S)


def test_device_memory_of_a_failed_save_is_given_back(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    before = machine.bytes_on()
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, training.state)
    with torch.no_grad():
        training.model.hidden.weight.add_(1)
    machine.timeline.may_finish.set()
    with pytest.raises(statehold.errors.TornSnapshot):
        save.wait("committed", DEADLINE_S)
    inside(ckpt).pipeline.drain(DEADLINE_S)
    machine.finish()
    assert machine.bytes_on() == before
