"""The CUDA path on a CUDA device: pinned staging, a side stream, the gate as a stream wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.memory import CountedRuntime
from torch import nn

import statehold
from statehold.errors import TornSnapshot
from support.cuda import copies_of
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.gpu import keep_busy, needs_cuda, pin_everything, pinned_buffers

pytestmark = needs_cuda

ROOMY = {"staging_bytes": "64MiB", "io": statehold.Io(buffer_bytes="4MiB")}


class Run:
    """A model with a buffer and a transposed parameter, trained by AdamW on the device."""

    def __init__(self, seed: int, width: int = 64, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
        ).cuda()
        self.model.twisted = nn.Parameter(torch.randn(width, 8, device="cuda").t())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, **options)
        self.width = width
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "rng": statehold.Rng()}

    def capture(self) -> Run:
        """From now on the update is the replay of a graph; gradients keep their memory."""
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.step()  # makes the optimizer's state, and gradients
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.optimizer.step()
        return self

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=self.graph is None)
        data = torch.randn(32, self.width, device="cuda")
        loss = self.model(data).square().mean() + (self.model.twisted @ data.t()).square().mean()
        loss.backward()
        if self.graph is None:
            self.optimizer.step()
        else:
            self.graph.replay()
        return loss.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state.values()):
            found |= {f"{index}.{key}": value for key, value in state.items()}
        return {name: value.detach().clone() for name, value in found.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(tmp_path / "run", **ROOMY) as ckpt:
        yield ckpt


def eager(seed: int, width: int, **options: Any) -> Run:
    return Run(seed, width, **options)


def captured(seed: int, width: int) -> Run:
    return Run(seed, width, capturable=True).capture()


@pytest.mark.parametrize(
    "make",
    [
        eager,
        partial(eager, fused=True),
        partial(eager, capturable=True),
        captured,
    ],
    ids=["foreach", "fused", "capturable", "captured"],
)
@pytest.mark.parametrize("settings", [ROOMY, SMALL], ids=["roomy", "small"])
def test_training_that_saves_each_step(
    tmp_path: Path, make: Callable[[int, int], Run], settings: dict[str, Any]
) -> None:
    """Also where the update is the replay of a graph, before which no optimizer's hook runs."""
    width = 64 if settings is ROOMY else 1024  # a layer is then twice the staging memory
    run, seen = make(0, width), {}
    with statehold.Checkpointer(tmp_path / "run", **settings) as ckpt:
        for step in range(1, 6):
            run.step()
            ckpt.save(step, run.state)
            seen[step] = run.tensors()
    losses = [run.step() for _ in range(3)]
    with statehold.Checkpointer(tmp_path / "run", **settings) as ckpt:
        fresh = make(1, width)
        places = {name: value.data_ptr() for name, value in fresh.model.state_dict().items()}
        for step, expected in seen.items():
            got = ckpt.restore(fresh.state, step)
            assert got == step
            assert same(fresh.tensors(), expected)
    assert {n: v.data_ptr() for n, v in fresh.model.state_dict().items()} == places
    got = [fresh.step() for _ in range(3)]
    assert got == losses


def test_the_gate_is_a_stream_wait(ckpt: statehold.Checkpointer) -> None:
    run = Run(0)
    run.step()
    pin_everything(ckpt, 0)
    ckpt.save(1, run.state).wait("committed", DEADLINE_S)  # loads the kernels that a save needs
    expected = run.tensors()
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.cuda.synchronize()
    behind = keep_busy()
    save = ckpt.save(2, run.state)
    must(copies_of(ckpt).enqueued.wait(DEADLINE_S))
    run.optimizer.step()
    assert not behind.query(), "the host waited for the device"
    assert not save.done("staged"), "the copies did not wait for the device"
    save.wait("committed", DEADLINE_S)
    assert save.stats.gate_s == 0
    assert not same(run.tensors(), expected)
    ckpt.restore(run.state, 2)
    assert same(run.tensors(), expected)


def test_a_change_before_the_gate_is_torn(tmp_path: Path) -> None:
    run = Run(0, 1024)
    run.step()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        save = ckpt.save(1, run.state)
        with torch.no_grad():
            run.model[0].weight.add_(1)
        holdup.release()
        with pytest.raises(TornSnapshot) as caught:
            save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "model.0.weight"


def test_buffers_are_pinned_once_and_only_those_that_are_used(tmp_path: Path) -> None:
    run = Run(0)
    with CountedRuntime() as runtime:
        with statehold.Checkpointer(tmp_path / "run", **ROOMY) as ckpt:
            for step in range(1, 4):
                run.step()
                ckpt.save(step, run.state).wait("committed", DEADLINE_S)
            ckpt.restore(run.state)
            pinned = pinned_buffers(ckpt)
            assert any(pinned)
            assert not all(pinned), "a buffer that was not used takes no memory"
            assert runtime.calls == len(runtime.pinned) == sum(pinned)
        assert not runtime.pinned


def test_random_numbers_on_the_device_go_on(ckpt: statehold.Checkpointer) -> None:
    torch.cuda.manual_seed(3)
    ckpt.save(1, {"rng": statehold.Rng()}).wait("committed", DEADLINE_S)
    drawn = torch.randn(8, device="cuda")
    ckpt.restore({"rng": statehold.Rng()})
    assert torch.equal(torch.randn(8, device="cuda"), drawn)


def test_a_fused_step_continues_in_a_plain_optimizer(ckpt: statehold.Checkpointer) -> None:
    run, fresh = Run(0, fused=True), Run(1)
    run.step(), fresh.step()
    ckpt.save(1, run.state).wait("committed", DEADLINE_S)
    ckpt.restore(fresh.state)
    assert fresh.optimizer.param_groups[0]["fused"]
    assert all(state["step"].is_cuda for state in fresh.optimizer.state.values())
    for each in (run, fresh):
        torch.cuda.manual_seed(9)  # both draw the same data
        each.step()
    assert same(run.tensors(), fresh.tensors())


def test_a_step_moves_between_device_and_host(ckpt: statehold.Checkpointer) -> None:
    model = nn.Linear(33, 17).cuda()
    ckpt.save(1, {"model": model}).wait("committed", DEADLINE_S)
    on_host = nn.Linear(33, 17)
    ckpt.restore({"model": on_host})
    assert torch.equal(on_host.weight, model.weight.cpu())
    ckpt.save(2, {"model": on_host}).wait("committed", DEADLINE_S)
    again = nn.Linear(33, 17).cuda()
    ckpt.restore({"model": again})
    assert torch.equal(again.weight, model.weight)
