"""The device path on host memory, with the real engine: late copies make every wrong order show."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from devices.conftest import bits_on, restored_on, trained_on, training_on
from statehold import _core
from statehold.errors import ChecksumError, DeviceError, StateholdError, TornSnapshot
from statehold.tensors.devices import Devices, pinning
from statehold.tensors.devices.copying import DeviceCopies
from statehold.tensors.devices.elements import SMALL_BYTES
from statehold.tensors.devices.jobs import JobSource
from statehold.tensors.devices.relay import AT_ONCE
from support.cuda import Machine, copies_of
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.gpu import pinned_buffers
from support.inside import inside


@pytest.mark.parametrize("width", [32, 1024])  # one buffer, and many times the staging memory
def test_every_byte_arrives(
    tmp_path: Path, ckpt: statehold.Checkpointer, machine: Machine, width: int
) -> None:
    training = trained_on(machine, width)
    expected = {}
    for step in range(1, 4):
        training.step()
        expected[step] = bits_on(machine, training)
        ckpt.save(step, training.state)
    ckpt.close()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as again:
        for step in expected:
            assert restored_on(machine, again, step, width) == expected[step]


def test_buffers_are_pinned_once_and_only_those_that_are_used(
    tmp_path: Path, machine: Machine
) -> None:
    training = trained_on(machine)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"host": torch.tensor(3.0)}).wait("committed", DEADLINE_S)
        assert not machine.pins.calls, "no device has a part in it yet"
        for step in range(2, 5):
            ckpt.save(step, training.state).wait("committed", DEADLINE_S)
        ckpt.restore(training.state)
        address = inside(ckpt).runtime.engine.staging_address
        buffers = {address: 1 << 20, address + (1 << 20): 1 << 20}
        assert len(machine.pins.calls) == 1  # of two: the state fits in one
        assert machine.pins.ranges.items() <= buffers.items()
        assert sum(pinned_buffers(ckpt)) == 1
        assert not machine.pins.forked()
        larger = trained_on(machine, width=1024)
        ckpt.save(5, larger.state).wait("committed", DEADLINE_S)
        assert machine.pins.ranges == buffers
        assert len(machine.pins.calls) == 2
    assert not machine.pins.ranges
    assert len(machine.pins.calls) == 4


def test_others_may_launch_after_each_buffer_that_is_pinned(
    ckpt: statehold.Checkpointer, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's lock that is taken again at once is not given to those who wait for it."""
    seen: list[int] = []
    clock = SimpleNamespace(sleep=lambda seconds: seen.append(len(machine.pins.calls)))
    monkeypatch.setattr(pinning, "time", clock)
    training = trained_on(machine, width=1024)  # both buffers are used
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    assert seen == [1, 2]


def test_memory_that_cannot_be_pinned_is_used_and_reported(
    tmp_path: Path, ckpt: statehold.Checkpointer, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.may_pin = False
    training = trained_on(machine)
    for step in (1, 2):
        ckpt.save(step, training.state).wait("committed", DEADLINE_S)
    assert restored_on(machine, ckpt, 2) == bits_on(machine, training)
    assert caplog.text.count("could not be pinned") == 1
    ckpt.close()
    assert "unpin" not in dict(machine.pins.calls)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as again:
        again.restore(training.state, 2)
        training.step()  # the runtime's error was dealt with: no launch of this thread reports it


def test_the_gate_makes_the_stream_wait_instead_of_the_host(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    training.backward()
    expected = bits_on(machine, training)
    machine.timeline.may_finish.clear()
    machine.timeline.host_waits.clear()
    save = ckpt.save(1, training.state)  # returns although no device copy can complete
    must(copies_of(ckpt).enqueued.wait(DEADLINE_S))
    training.optimizer.step()
    training.optimizer.step()
    assert not save.done("staged")
    assert save.stats.gate_s == 0
    assert "MainThread" not in machine.timeline.host_waits
    machine.timeline.run(machine.default(0))  # the updates come before anything else, if they can
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)  # the update was let through: it is no torn snapshot
    assert bits_on(machine, training)["hidden.weight"] != expected["hidden.weight"]
    assert restored_on(machine, ckpt, 1) == expected


def test_the_host_waits_while_copies_are_to_be_enqueued(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    holdup = Holdup(ckpt)
    training = trained_on(machine, width=1024)
    expected = bits_on(machine, training)
    save = ckpt.save(1, training.state)
    must(holdup.waiting.wait(DEADLINE_S))
    assert not copies_of(ckpt).passing()
    with pytest.raises(statehold.errors.WaitTimeout):
        ckpt.gate(0.01)
    holdup.release()
    training.step()
    save.wait("committed", DEADLINE_S)
    assert restored_on(machine, ckpt, 1, width=1024) == expected


def test_the_host_waits_no_longer_than_that(
    ckpt: statehold.Checkpointer, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update comes right after save(), as with a graph of the whole step, while the device still
    works: nothing completes before the update has been given to it."""
    training = trained_on(machine)
    training.backward()
    expected = bits_on(machine, training)
    at_the_gate, run = threading.Event(), DeviceCopies.run

    def late(copies: DeviceCopies) -> None:
        must(at_the_gate.wait(DEADLINE_S))
        run(copies)

    monkeypatch.setattr(DeviceCopies, "run", late)
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, training.state)
    enqueued = copies_of(ckpt).enqueued
    wait = enqueued.wait

    def noticed(timeout: float | None = None) -> bool:
        if timeout != 0:
            at_the_gate.set()
        return wait(timeout)

    monkeypatch.setattr(enqueued, "wait", noticed)
    ckpt.gate(DEADLINE_S / 6)
    training.optimizer.step()
    assert not save.done("staged")
    assert save.stats.gate_s > 0
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)
    assert restored_on(machine, ckpt, 1) == expected


def test_no_stream_waits_for_lazy_host_tensors(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    on_host, on_device = torch.randn(1 << 15), machine.put(torch.randn(64))
    machine.timeline.may_finish.clear()
    ckpt.save(1, {"host": statehold.Gated(on_host), "device": statehold.Gated(on_device)})
    copies = copies_of(ckpt)
    must(copies.enqueued.wait(DEADLINE_S))
    assert not copies.passing()
    machine.timeline.may_finish.set()
    ckpt.gate(DEADLINE_S)


def test_a_change_before_the_gate_fails_the_save(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, training.state)
    copies = copies_of(ckpt)
    must(copies.enqueued.wait(DEADLINE_S))
    with torch.no_grad():
        training.model.hidden.weight.add_(1)
    assert not copies.passing()
    machine.timeline.may_finish.set()
    with pytest.raises(TornSnapshot) as caught:
        save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "model.hidden.weight"
    assert not copies.passing(), "a failed save is not passed, it is waited for: it has ended"
    training.step()
    assert ckpt.steps() == []


def test_buffers_are_those_of_the_call(ckpt: statehold.Checkpointer, machine: Machine) -> None:
    training = trained_on(machine)
    expected = bits_on(machine, training)
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, training.state)
    with torch.no_grad():
        training.model.norm.running_mean.add_(1)  # copied by nobody so far
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)
    assert restored_on(machine, ckpt, 1)["norm.running_mean"] == expected["norm.running_mean"]


LAYOUTS: dict[str, torch.Tensor] = {
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "sliced": torch.arange(40).reshape(4, 10)[:, 2:7],
    "offset": torch.arange(10, dtype=torch.int16)[3:],
    "conj": torch.randn(5, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False, True]),
    "fp8": torch.randn(7).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "single": torch.arange(8.0)[3:4:2],  # is contiguous, and has a stride of 2
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("mark", [statehold.Gated, statehold.Volatile])
def test_non_contiguous_and_odd_dtypes(
    ckpt: statehold.Checkpointer, machine: Machine, mark: Any
) -> None:
    state = {name: machine.put(value) for name, value in LAYOUTS.items()}
    ckpt.save(1, {name: mark(value) for name, value in state.items()}).wait("committed", DEADLINE_S)
    with machine.still():
        live = {name: torch.zeros_like(value) for name, value in LAYOUTS.items()}
        live["single"] = torch.zeros(8)[3:4:2]
        live["transposed"] = torch.zeros(3, 4).t()
        live["sliced"] = torch.zeros(4, 10, dtype=torch.int64)[:, 2:7]
    live = {name: machine.put(value) for name, value in live.items()}
    ckpt.restore(live)
    with machine.still():
        for name, value in live.items():
            expected = LAYOUTS[name].resolve_conj().tolist()
            assert value.resolve_conj().tolist() == expected, name
    assert live["transposed"].stride() == (1, 4)


def test_damage_is_found_before_anything_reaches_the_device(
    tmp_path: Path, ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    [path] = (tmp_path / "run").glob("step-*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    live = training_on(machine, seed=4)
    before = bits_on(machine, live)
    with pytest.raises(ChecksumError):
        ckpt.restore(live.state, 1)
    assert bits_on(machine, live)["hidden.weight"] == before["hidden.weight"]
    ckpt.save(2, training.state).wait("committed", DEADLINE_S)  # every buffer came back
    assert restored_on(machine, ckpt, 2) == bits_on(machine, training)


class OneBuffer:
    """A job with a single buffer: it can lend the next only when it has the last one back."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.memory = bytearray(4)
        self.written = b""
        self.fills_left = 3
        self._fails_at = fails_at
        self._lent = False

    def next_fills(self, timeout: float | None, most: int) -> list[Any]:
        if self.fills_left == self._fails_at:
            raise StateholdError("the job has failed")
        if self._lent:
            assert timeout is not None, "would wait for ever"
            return []
        if not self.fills_left:
            return []
        self.fills_left -= 1
        self._lent = True
        offset = 4 * (2 - self.fills_left)
        return [SimpleNamespace(view=memoryview(self.memory), pieces=[(1, offset, 0, 4)])]

    def filled_all(self, fills: Any) -> None:
        self._lent = False
        self.written += bytes(self.memory)

    def wait_eager(self, timeout: float | None) -> bool:
        return True


@pytest.mark.parametrize(("fails_at", "written"), [(None, 12), (1, 8), (3, 0)])
def test_buffers_go_back_after_their_copies(
    machine: Machine, fails_at: int | None, written: int
) -> None:
    source = torch.arange(12, dtype=torch.uint8)
    captured = statehold.tensors.kinds.capture({"t": statehold.Gated(machine.put(source))})
    job = OneBuffer(fails_at)
    copies = Devices().copies([JobSource(job, captured.tensors)], captured)
    assert copies is not None
    if fails_at is None:
        copies.run()
    else:
        with pytest.raises(StateholdError):
            copies.run()
    assert not job._lent
    assert job.written == bytes(source.tolist())[:written]


class LateBuffer(OneBuffer):
    """A job whose second buffer comes later than it is asked for, and without one given back."""

    asked = 0

    def next_fills(self, timeout: float | None, most: int) -> list[Any]:
        self.asked += 1
        if self.asked == 2:
            return []
        self._lent = False
        return super().next_fills(timeout, most)


def test_all_copies_are_enqueued_before_a_device_is_waited_for(machine: Machine) -> None:
    source = machine.put(torch.arange(12, dtype=torch.uint8))
    captured = statehold.tensors.kinds.capture({"t": statehold.Gated(source)})
    job = LateBuffer()
    copies = Devices().copies([JobSource(job, captured.tensors)], captured)
    assert copies is not None
    machine.timeline.may_finish.clear()
    thread = threading.Thread(target=copies.run)
    thread.start()
    is_enqueued = copies.enqueued.wait(DEADLINE_S / 6)
    machine.timeline.may_finish.set()
    thread.join(DEADLINE_S)
    assert is_enqueued, "the device was waited for while a buffer was still to come"


class ManyBuffers:
    """A job that lends all of its buffers at once, each for a part of a tensor."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.memory = [bytearray(nbytes) for _ in range(count)]
        self.fills_left = count
        self.given_back = 0
        self._nbytes = nbytes

    def next_fills(self, timeout: float | None, most: int) -> list[Any]:
        first = len(self.memory) - self.fills_left
        lent = range(first, min(first + most, len(self.memory)))
        self.fills_left -= len(lent)
        return [
            SimpleNamespace(
                view=memoryview(self.memory[index]),
                pieces=[(1, index * self._nbytes, 0, self._nbytes)],
            )
            for index in lent
        ]

    def filled_all(self, fills: Any) -> None:
        self.given_back += len(fills)

    def wait_eager(self, timeout: float | None) -> bool:
        return True


def test_large_parts_of_many_buffers_are_copied_by_one_call(machine: Machine) -> None:
    """Each call of torch would take the interpreter lock from a program that launches kernels."""
    count, nbytes = 40, SMALL_BYTES
    source = torch.arange(count * nbytes // 8)
    captured = statehold.tensors.kinds.capture({"t": statehold.Gated(machine.put(source))})
    job, calls = ManyBuffers(count, nbytes), []

    def call(function: int, **copies: Any) -> int:
        calls.append(len(copies["sizes"]))
        return _core.call_copies(function, **copies)

    copies = Devices(call).copies([JobSource(job, captured.tensors)], captured)
    assert copies is not None
    before = machine.timeline.launches
    copies.run()
    assert calls == [AT_ONCE, AT_ONCE, count - 2 * AT_ONCE]
    assert machine.timeline.launches - before == machine.copies == count
    assert job.given_back == count
    assert b"".join(job.memory) == source.numpy().tobytes()


def test_a_copy_that_is_refused_fails_the_save_and_gives_the_buffers_back(
    machine: Machine,
) -> None:
    source = machine.put(torch.arange(16 * SMALL_BYTES // 8))
    captured = statehold.tensors.kinds.capture({"t": statehold.Gated(source)})
    job = ManyBuffers(16, SMALL_BYTES)
    copies = Devices(_core.call_copies).copies([JobSource(job, captured.tensors)], captured)
    assert copies is not None
    machine.fails_at = lambda operation: operation == "a launch"
    with pytest.raises(DeviceError):
        copies.run()
    assert machine.failure
    assert job.given_back == 16


def test_a_failing_copy_gives_its_buffer_back(machine: Machine) -> None:
    source = machine.put(torch.arange(12, dtype=torch.uint8))
    captured = statehold.tensors.kinds.capture({"t": source})
    job = OneBuffer()
    copies = Devices().copies([JobSource(job, captured.tensors)], captured)
    assert copies is not None
    machine.fails_at = lambda operation: operation == "a launch"
    with pytest.raises(DeviceError, match="illegal memory access"):
        copies.run()
    assert machine.failure
    assert not job._lent


def test_what_an_optimizer_keeps_is_not_cloned_on_the_device(machine: Machine) -> None:
    model = machine.module(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    capture = statehold.tensors.kinds.capture
    cloned = {each.spec.name for each in capture(state, stepping=[optimizer]).tensors if each.owned}
    assert cloned == {"model.weight", "model.bias"}
    assert all(each.owned for each in capture(state).tensors)


def test_host_states_involve_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statehold.tensors.devices.devices.backend_for", pytest.fail)
    model = nn.Linear(4, 4)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"model": model}).wait("committed", DEADLINE_S)
        got = ckpt.restore({"model": model})
        assert got == 1
