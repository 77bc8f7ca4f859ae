"""Eager tensors on a device: cloned while they are small; else save() waits until their copies are
enqueued. The trainer may change them as soon as save() has returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import statehold
from devices.conftest import trained_on
from statehold.errors import StorageError, TornSnapshot
from statehold.tensors import captured, found
from statehold.tensors.devices import Devices
from statehold.tensors.devices.jobs import JobSource
from statehold.tensors.kinds import capture
from support.cuda import Machine
from support.faults import DEADLINE_S, SMALL, Holdup, must, spy_on
from support.inside import inside

LARGE = 5 << 18  # elements of 4 bytes: 5 MiB, two and a half times the staging memory


@pytest.fixture
def no_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "CLONED_BYTES_MAX", 0)


def on_device(machine: Machine, count: int = 3, size: int = 1000) -> dict[str, torch.Tensor]:
    return {str(i): machine.put(torch.full((size,), float(i))) for i in range(count)}


def spoil(state: dict[str, torch.Tensor]) -> None:
    """What a trainer may do once save() has returned."""
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(-1)


def check_saved(machine: Machine, ckpt: statehold.Checkpointer, count: int, size: int) -> None:
    live = {str(i): machine.put(torch.zeros(size)) for i in range(count)}
    ckpt.restore(live, 1, only=list(live))
    with machine.still():
        for name, tensor in live.items():
            assert tensor.min() == tensor.max() == float(name)


@pytest.mark.usefixtures("no_clones")
def test_large_ones_are_not_cloned_and_are_those_of_the_call(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    state = on_device(machine)
    before = machine.bytes_on()
    machine.reset_peak()
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, state)  # returns although no copy can complete
    spoil(state)
    assert not save.done("staged")
    assert machine.peak_on() - before <= 3 * 4000  # the scratch of a buffer
    assert save.stats.eager_bytes == 3 * 4000
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)
    check_saved(machine, ckpt, 3, 1000)


def test_small_ones_are_cloned_and_nobody_is_waited_for(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    holdup = Holdup(ckpt)
    large = {"large": statehold.Gated(machine.put(torch.ones(LARGE)))}
    first = ckpt.save(0, large)  # the stage thread is held up with it
    must(holdup.waiting.wait(DEADLINE_S))
    state = on_device(machine)
    before = machine.bytes_on()
    save = ckpt.save(1, state)
    assert machine.bytes_on() - before == 3 * 4000
    spoil(state)
    assert not first.done("staged")
    holdup.release()
    save.wait("committed", DEADLINE_S)
    check_saved(machine, ckpt, 3, 1000)


def test_a_state_without_them_waits_for_no_device(machine: Machine) -> None:
    state = {"eager": torch.ones(1 << 16), "lazy": statehold.Gated(machine.put(torch.ones(3)))}
    found = capture(state)
    copies = Devices().copies([JobSource(SimpleNamespace(fills_left=1), found.tensors)], found)
    assert copies is not None
    copies.wait_eager()  # nobody runs them


def test_what_finds_no_memory_for_clones_is_waited_for(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    state = on_device(machine)
    machine.memory.limits[0] = machine.bytes_on() + 2 * 4000  # for two of three
    save = ckpt.save(1, state)
    machine.memory.limits.clear()
    spoil(state)
    save.wait("committed", DEADLINE_S)
    check_saved(machine, ckpt, 3, 1000)


class Meanwhile:
    """Does something on another thread once the data file is asked for; then it may be opened."""

    def __init__(
        self, ckpt: statehold.Checkpointer, machine: Machine, act: Callable[[], None]
    ) -> None:
        self._holdup, self._machine, self._act = Holdup(ckpt), machine, act
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._machine.enter()
        must(self._holdup.waiting.wait(DEADLINE_S))
        self._act()
        self._holdup.release()

    def end(self) -> None:
        self._thread.join(DEADLINE_S)
        must(not self._thread.is_alive())


@pytest.mark.usefixtures("no_clones")
@pytest.mark.parametrize("beside", [0, 1 << 20])  # elements of the host, large enough to stay there
def test_more_than_the_staging_memory_waits_for_writes(
    ckpt: statehold.Checkpointer, machine: Machine, beside: int
) -> None:
    state = on_device(machine, size=LARGE // 3)
    host = {"host": torch.full((beside,), 7.0)}
    has_returned = threading.Event()
    seen: list[bool] = []
    meanwhile = Meanwhile(ckpt, machine, lambda: seen.append(has_returned.is_set()))
    save = ckpt.save(1, {**state, **host})
    has_returned.set()
    spoil(state)
    spoil(host)
    meanwhile.end()
    save.wait("committed", DEADLINE_S)
    assert seen == [False]
    check_saved(machine, ckpt, 3, LARGE // 3)


@pytest.mark.usefixtures("no_clones")
def test_a_change_while_they_are_waited_for_fails_the_save(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    state = on_device(machine, size=LARGE // 3)
    meanwhile = Meanwhile(ckpt, machine, lambda: spoil(state))
    with pytest.raises(TornSnapshot) as caught:
        ckpt.save(1, state)
    meanwhile.end()
    assert caught.value.facts["tensor"] == "0"
    inside(ckpt).pipeline.drain(DEADLINE_S)
    assert ckpt.steps() == []


@pytest.mark.usefixtures("no_clones")
def test_a_save_that_fails_meanwhile_wakes_the_trainer(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    fired = []

    def refuse(operation: str, _: Any) -> None:
        if operation == "open_write" and not fired:
            fired.append(operation)
            raise StorageError("no room", facts={})

    spy_on(ckpt, refuse)
    state = on_device(machine, size=LARGE // 3)
    with pytest.raises(StorageError, match="no room"):
        ckpt.save(1, state)
    assert fired
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    spoil(state)
    check_saved(machine, ckpt, 3, LARGE // 3)


@pytest.mark.usefixtures("no_clones")
def test_a_device_that_fails_meanwhile_wakes_the_trainer(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    state = on_device(machine)

    def fails_at(operation: str) -> bool:
        name = threading.current_thread().name
        return operation == "a launch" and name.startswith("statehold-stage")

    machine.fails_at = fails_at
    with pytest.raises(statehold.errors.DeviceError):
        ckpt.save(1, state).wait("staged", 60)  # save() raises it, unless it was already through
    assert machine.failure


def test_without_clones_a_model_in_training_is_saved_at_every_step(
    ckpt: statehold.Checkpointer, machine: Machine, no_clones: None
) -> None:
    training = trained_on(machine)
    expected = {}
    for step in range(1, 5):
        training.step()
        with machine.still():
            expected[step] = training.model.norm.running_mean.clone()
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer}
        save = ckpt.save(step, state)
    save.wait("committed", DEADLINE_S)
    for step in (4, 3):
        live = {"norm.running_mean": machine.put(torch.zeros(32))}
        ckpt.restore({"model": live}, step, only=["model.norm.running_mean"])
        with machine.still():
            assert torch.equal(live["norm.running_mean"], expected[step])


STATES: dict[str, Callable[[Machine], dict[str, Any]]] = {
    "buffers": lambda machine: {"model": trained_on(machine).model},
    "state_dict": lambda machine: {"model": trained_on(machine).model.state_dict()},
    "host": lambda machine: {"small": torch.ones(10), "device": machine.put(torch.ones(3))},
    "conjugates": lambda machine: {"c": machine.put(torch.ones(3, dtype=torch.complex64)).conj()},
    "gated": lambda machine: {"g": statehold.Gated(machine.put(torch.ones(3)))},
}


@pytest.mark.parametrize("name", STATES)
def test_the_layout_follows_from_the_marks_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ranks have different sizes and memory, and have to lay out alike: as on the host."""
    state = STATES[name](machine)
    layouts = []
    for most in (0, 1 << 30):
        monkeypatch.setattr(captured, "CLONED_BYTES_MAX", most)
        layouts.append([each.spec for each in capture(state).tensors])
    if name != "conjugates":  # what they show has to be made
        machine.memory.limits[0] = machine.bytes_on()
        layouts.append([each.spec for each in capture(state).tensors])
        machine.memory.limits.clear()
    with machine.still(), monkeypatch.context() as patch:
        patch.setattr(found, "is_external", lambda _: False)
        layouts.append([each.spec for each in capture(state).tensors])
    assert all(layout == layouts[0] for layout in layouts)


def test_eager_ones_come_first_in_the_file(
    tmp_path: Path, ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    state = {
        "lazy": statehold.Gated(machine.put(torch.ones(4))),
        "eager": machine.put(torch.ones(4)),
    }
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    [path] = (tmp_path / "run").glob("step-*/*.safetensors")
    header = path.read_bytes()[:4096]
    assert header.index(b'"eager":{"dtype"') < header.index(b'"lazy":{"dtype"')


@pytest.mark.usefixtures("no_clones")
def test_ctrl_c_while_they_are_waited_for_commits_nothing(
    ckpt: statehold.Checkpointer, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = on_device(machine, size=LARGE // 3)
    machine_holdup = Holdup(ckpt)

    def interrupted(self: Any) -> None:
        must(machine_holdup.waiting.wait(DEADLINE_S))
        raise KeyboardInterrupt

    monkeypatch.setattr("statehold.tensors.devices.copying.DeviceCopies.wait_eager", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(1, state)
    spoil(state)
    machine_holdup.release()
    inside(ckpt).pipeline.drain(DEADLINE_S)
    assert ckpt.steps() == []


@pytest.fixture
def pair(tmp_path: Path, machine: Machine) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(tmp_path / "pair", **SMALL) as ckpt:
        yield ckpt
        machine.timeline.may_finish.set()


@pytest.mark.usefixtures("no_clones")
def test_two_saves_of_everything_mixed_end_with_two_buffers(
    pair: statehold.Checkpointer, machine: Machine
) -> None:
    """The eager blocks of the second save do not take the buffers that the first one needs."""
    state: dict[str, Any] = {}
    for i in range(8):  # in turn in the file: eager and lazy, host and device
        state[f"eager host {i}"] = torch.full((1 << 17,), float(i))
        state[f"eager {i}"] = machine.put(torch.full((1 << 17,), float(i)))
        state[f"lazy {i}"] = statehold.Gated(machine.put(torch.full((1 << 17,), float(i))))
        state[f"lazy host {i}"] = statehold.Gated(torch.full((1 << 17,), float(i)))
    saves = [pair.save(step, state) for step in range(1, 5)]
    for save in saves:
        save.wait("committed", DEADLINE_S)
    live = {name: machine.put(torch.zeros(1 << 17)) for name in state}
    pair.restore(live, 3)
    with machine.still():
        assert all((value == float(name.split()[-1])).all() for name, value in live.items())
