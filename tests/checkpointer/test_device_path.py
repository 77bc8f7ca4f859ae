"""Saves of device tensors through the public Checkpointer, with a stand-in for the device.

Large floating-point tensors count as being on the device, the others (an optimizer's `step`) as
being on the host.
tests/gpu does the same on a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import statehold
from statehold.errors import TornSnapshot, WaitTimeout
from statehold.state import capture, restore
from support.device import DEADLINE_S, Ordered
from support.training import Training, bits

ROOMY = {"staging_bytes": "64MiB", "buffer_bytes": "1MiB", "copy_threads": 2}
TIGHT = {"staging_bytes": "2MiB", "buffer_bytes": "1MiB", "copy_threads": 2}
WIDE = 512


def is_stand_in(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 100 and tensor.is_floating_point()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Ordered:
    for module in (capture, restore):
        monkeypatch.setattr(module, "is_external", is_stand_in)
    return Ordered()


@pytest.fixture
def ckpt(run: Path, device: Ordered) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(run, **ROOMY) as ckpt:
        ckpt._opened().devices._backend = device
        yield ckpt
        device.may_run.set()


def trained() -> Training:
    training = Training(width=WIDE)
    training.step()
    return training


def restored(ckpt: statehold.Checkpointer) -> Training:
    training = Training(seed=9, width=WIDE)
    ckpt.restore(training.state)
    return training


@pytest.mark.parametrize("options", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_training_goes_on_bit_for_bit(run: Path, device: Ordered, options: dict[str, str]) -> None:
    whole = Training()
    for _ in range(8):
        whole.step()
    first = Training()
    with statehold.Checkpointer(run, **options) as ckpt:
        ckpt._opened().devices._backend = device
        for step in range(1, 5):
            first.step()
            ckpt.save(step, first.state)
    with statehold.Checkpointer(run, **options) as ckpt:
        ckpt._opened().devices._backend = device
        resumed = Training(seed=1)
        before = resumed.model.hidden.weight.data_ptr()
        assert ckpt.restore(resumed.state) == 4
        assert resumed.model.hidden.weight.data_ptr() == before
    for _ in range(4):
        resumed.step()
    assert device.copies > 0
    assert bits(resumed) == bits(whole)


def test_an_update_passes_before_the_bytes_have_arrived(
    ckpt: statehold.Checkpointer, device: Ordered
) -> None:
    training = trained()
    expected = bits(training)
    device.may_run.clear()
    save = ckpt.save(1, training.state)
    ckpt.gate(DEADLINE_S)
    assert "hold back" in device.log[-1]
    training.step()
    save.wait("committed", DEADLINE_S)
    assert bits(restored(ckpt)) == expected


def test_a_change_before_the_gate_fails_the_save(
    ckpt: statehold.Checkpointer, device: Ordered
) -> None:
    training = trained()
    device.may_run.clear()
    save = ckpt.save(1, training.state)
    with torch.no_grad():
        training.model.hidden.weight.add_(1)
    device.may_run.set()
    with pytest.raises(TornSnapshot) as caught:
        save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "model.hidden.weight"
    assert ckpt.steps() == []


def test_large_lazy_tensors_on_the_host_close_the_short_way(
    ckpt: statehold.Checkpointer, device: Ordered
) -> None:
    on_host = torch.zeros(1 << 20, dtype=torch.uint8)
    device.may_run.clear()
    save = ckpt.save(1, {**trained().state, "host": statehold.Gated(on_host)})
    with pytest.raises(WaitTimeout):
        ckpt.gate(0.05)
    device.may_run.set()
    save.wait("committed", DEADLINE_S)


def test_a_lost_device_fails_the_save_with_what_is_still_safe(
    ckpt: statehold.Checkpointer, device: Ordered
) -> None:
    training = trained()
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    expected = bits(training)
    device._fail_at = device.copies + 2
    with pytest.raises(statehold.errors.StateholdError) as caught:
        ckpt.save(2, training.state).wait("committed", DEADLINE_S)
    assert "the device is lost" in str(caught.value)
    assert caught.value.facts["still safe"] == "step 1 and older"
    device._fail_at = None
    assert bits(restored(ckpt)) == expected


def test_staging_memory_is_pinned_once_and_given_back(run: Path, device: Ordered) -> None:
    with statehold.Checkpointer(run, **ROOMY) as ckpt:
        ckpt._opened().devices._backend = device
        for step in range(1, 4):
            ckpt.save(step, trained().state)
    pins = [entry.split()[0] for entry in device.log if "pin" in entry]
    assert pins == ["pin", "unpin"]
