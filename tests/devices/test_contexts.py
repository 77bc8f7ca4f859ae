"""Which devices statehold makes contexts on, whose threads it works on, and several devices."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from devices.conftest import training_on
from statehold import offload
from statehold.checkpoint.keeper import wait_for_dropped
from support.cuda import Machine, install
from support.faults import DEADLINE_S, SMALL, must
from support.training import Training

SECOND = 1


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two devices; this rank's is the second."""
    machine = install(monkeypatch, count=2)
    machine.cuda.set_device(SECOND)
    with machine.in_use():
        yield machine


def state_on(machine: Machine, device: int) -> dict[str, Any]:
    return {"w": statehold.Gated(machine.put(torch.randn(300, 1000), device))}


def test_no_context_is_made_on_another_device(pair: Machine, tmp_path: Path) -> None:
    state = state_on(pair, SECOND)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).wait("committed", DEADLINE_S)
        ckpt.restore(state)
    assert pair.pins.calls
    assert pair.contexts == {SECOND}


def test_closing_works_for_a_device_that_has_failed(pair: Machine, tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, state_on(pair, SECOND)).wait("committed", DEADLINE_S)
        pair.cuda.set_device(0)
        pair.failure = "CUDA error: unspecified launch failure"
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(2, {"host": torch.ones(8)}).wait("committed", DEADLINE_S)


def test_the_caller_keeps_its_device_and_its_stream(pair: Machine, tmp_path: Path) -> None:
    state = state_on(pair, 0)  # not on the caller's device
    mine = pair.cuda.Stream()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt, pair.cuda.stream(mine):
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        ckpt.restore(state)
        assert pair.cuda.current_device() == SECOND
        assert pair.cuda.current_stream() is mine
        assert pair.cuda.current_stream(0) is pair.default(0)


def test_one_state_on_two_devices(pair: Machine, tmp_path: Path) -> None:
    values = [torch.randn(300, 1000) for _ in range(2)]
    state = {str(i): pair.put(value, i) for i, value in enumerate(values)}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        gated = {name: statehold.Gated(tensor) for name, tensor in state.items()}
        save = ckpt.save(1, gated)
        ckpt.gate(DEADLINE_S)
        for tensor in state.values():
            tensor.zero_()
        save.wait("committed", DEADLINE_S)
        ckpt.restore(gated, 1)
    for name, tensor in state.items():
        assert torch.equal(pair.read(tensor), values[int(name)])


def test_a_dropped_checkpointer_unpins_before_its_memory_is_gone(
    machine: Machine, tmp_path: Path
) -> None:
    for index in range(3):
        run = str(tmp_path / f"run{index}")
        ckpt = statehold.Checkpointer(run, **SMALL)
        ckpt.save(1, {"model": training_on(machine).model}).wait("committed", DEADLINE_S)
        assert machine.pins.ranges
        del ckpt
        gc.collect()
        wait_for_dropped(run)
        assert not machine.pins.ranges  # the machine sees whether the memory was still there
    assert len(machine.pins.calls) == 6


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_save_goes_on_while_a_graph_is_captured(
    ckpt: statehold.Checkpointer, machine: Machine, mode: str
) -> None:
    """The first pinning, and the waits for events, come while another thread captures."""
    weights, other = machine.put(torch.randn(300, 1000)), machine.put(torch.ones(8))
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, {"w": statehold.Gated(weights)})
    graph, side = machine.cuda.CUDAGraph(), machine.cuda.Stream()
    ended = threading.Event()

    def wait() -> None:
        save.wait("committed", DEADLINE_S)
        ended.set()

    waiter = threading.Thread(target=wait)
    with machine.cuda.graph(graph, stream=side, capture_error_mode=mode):
        other.add_(1)
        machine.timeline.may_finish.set()
        waiter.start()
        must(ended.wait(DEADLINE_S))
    waiter.join()
    assert torch.equal(machine.read(other), torch.ones(8)), "a capture does nothing"
    graph.replay()
    assert torch.equal(machine.read(other), torch.full((8,), 2.0))
    live = machine.put(torch.zeros(300, 1000))
    ckpt.restore({"w": live}, 1)
    assert torch.equal(machine.read(live), machine.read(weights))


def test_a_run_on_the_host_does_not_initialize_cuda(tmp_path: Path, machine: Machine) -> None:
    """A process that has initialized it cannot fork workers that use a device."""
    machine.is_initialized = False
    machine.contexts.clear()
    training = Training(seed=0, width=32)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        for step in (1, 2):
            training.step()
            ckpt.save(step, training.state).wait("committed", DEADLINE_S)
        assert ckpt.restore(training.state) == 2
    host = torch.nn.Parameter(torch.ones(3))
    host.grad = torch.ones(3)
    with contextlib.closing(offload.AdamW([host], tiers=[offload.Host("1MiB")])) as optimizer:
        optimizer.step()
    assert not machine.is_initialized
    assert not machine.contexts
    machine.module(training.model)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(3, {"model": training.model}).wait("committed", DEADLINE_S)
    assert machine.is_initialized
