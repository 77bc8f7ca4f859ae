"""The emulated device does with torch's operations what a device does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import statehold
from devices.conftest import trained_on
from statehold import offload
from statehold.errors import TornSnapshot
from statehold.offload import wait_for_dropped
from statehold.tensors.storable import version_of
from support.cuda import Machine, copies_of, install
from support.faults import DEADLINE_S, must


def test_what_is_left_open_ends_with_its_machine() -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine = install(patch)
        with machine.in_use():
            param = torch.nn.Parameter(machine.put(torch.ones(3)))
            left = [offload.AdamW([param], tiers=[offload.Host("1MiB")])]
            assert machine.pins.ranges
        assert not machine.pins.ranges
    with pytest.MonkeyPatch.context() as patch:
        machine = install(patch, count=2)
        with machine.in_use():
            machine.cuda.set_device(1)
            left.clear()
            wait_for_dropped()
            assert machine.contexts == {1}


def test_foreach_operations_move_version_counters(machine: Machine) -> None:
    tensors = [machine.put(torch.ones(3)) for _ in range(2)]
    before = [version_of(each) for each in tensors]
    torch._foreach_add_(tensors, 1.0)
    torch._foreach_lerp_(tensors, [each.clone() for each in tensors], 0.5)
    assert [version_of(each) for each in tensors] == [each + 2 for each in before]


def test_a_foreach_update_past_the_gate_is_seen(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, training.state)
    must(copies_of(ckpt).enqueued.wait(DEADLINE_S))
    with torch.no_grad():
        torch._foreach_add_(list(training.model.parameters()), 1.0)
    machine.timeline.run(machine.default(0))
    machine.timeline.may_finish.set()
    with pytest.raises(TornSnapshot):
        save.wait("committed", DEADLINE_S)
    assert ckpt.steps() == []


def test_batch_norm_in_eval_mode(machine: Machine) -> None:
    norm = torch.nn.BatchNorm1d(4).eval()
    values = torch.randn(3, 4)
    expected = norm(values)
    machine.module(norm)
    with torch.no_grad():
        assert torch.equal(machine.read(norm(machine.put(values))), expected)


def test_tensors_of_inference_mode(machine: Machine) -> None:
    start = machine.put(torch.ones(3))
    with torch.inference_mode():
        average = start.clone()
        average.mul_(3)
        torch._foreach_add_([average], 1.0)
    assert average.is_inference()
    assert torch.equal(machine.read(average), torch.full((3,), 4.0))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_dtensors_on_a_device_are_saved_and_restored(
    ckpt: statehold.Checkpointer, machine: Machine, mesh: DeviceMesh
) -> None:
    def sharded(values: torch.Tensor) -> DTensor:
        return DTensor.from_local(machine.put(values), mesh, [Shard(0)], run_check=False)

    weight = torch.nn.Parameter(sharded(torch.arange(12.0).reshape(4, 3)))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, foreach=False)
    weight.grad = sharded(torch.ones(4, 3))
    optimizer.step()
    state = {"weight": weight, "optimizer": optimizer}
    expected = machine.read(weight.to_local())
    save = ckpt.save(1, state)
    optimizer.step()
    assert not torch.equal(machine.read(weight.to_local()), expected)
    save.wait("committed", DEADLINE_S)
    ckpt.restore(state, 1)
    assert torch.equal(machine.read(weight.to_local()), expected)
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert torch.equal(machine.read(momentum.to_local()), torch.ones(4, 3))


def test_sparse_tensors_of_the_host(machine: Machine) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
