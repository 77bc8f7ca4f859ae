"""Checks that run on every rank of a job of four: what capture sees of a distributed state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import Box, Layout, Mesh
from statehold.tensors.captured import CapturedTensor
from support.faults import must
from support.jobs import Job, captured
from support.wrapped import compiled


class Mlp(nn.Module):
    """Two layers of odd sizes: 7 rows over 4 ranks are 2, 2, 2 and 1, and 3 leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """An optimizer of the model after two steps: tensor parallel layers compute with even shards
    only, so the gradients are made up."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def two_dimensional() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Mlp()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])


def found(state: Mapping[str, Any]) -> dict[str, CapturedTensor]:
    return {each.spec.name: each for each in captured(state).tensors}


def live_tensors(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """What a state {"m": model, "o": optimizer} holds, under the names it should have."""
    tensors = {f"m.{name}": value for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"o.state.m.{name}.{key}"] = value
    return tensors


def assert_boxes(job: Job, captured: Mapping[str, CapturedTensor], live: Any) -> None:
    """Every box holds its piece of the whole, and together they tile it."""
    must(captured.keys() == live.keys())
    for name, each in captured.items():
        spec, value = each.spec, live[name]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        layout, shape = spec.layout, tuple(whole.shape)
        must(layout is not None, name)
        must(spec.global_shape == shape, name)
        box = layout.box(shape, job.rank)
        must((spec.offsets, spec.shape) == (box.offsets, box.shape), name)
        must(spec.nbytes == each.tensor.numel() * each.tensor.element_size())
        must(torch.equal(each.tensor, piece(whole, box)), name)
        must(sum(part.numel for part, _ in layout.boxes(shape)) == whole.numel(), name)


def piece(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.detach()


def check_fsdp2(job: Job) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = Mlp()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for make in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, momentum=0.9)):
        optimizer = trained(model, make(model.parameters()))
        captured = found({"m": model, "o": optimizer})
        assert_boxes(job, captured, live_tensors(model, optimizer))
        must(not any(each.spec.eager for each in captured.values()))
    must(captured["m.down.weight"].spec.shape == ((0, 7) if job.rank == 3 else (1, 7)))


def check_computing_is_no_change(job: Job) -> None:
    model = Mlp()
    for part in (model.up, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    optimizer = trained(model)
    result = captured({"m": model, "o": optimizer})
    model(torch.ones(4, 5)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    must(result.moved(eager=False) is None)


def check_tensor_parallel(job: Job) -> None:
    mesh = init_device_mesh("cpu", (4,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Mlp(), mesh, plan)
    optimizer = trained(model)
    captured = found({"m": model, "o": optimizer})
    assert_boxes(job, captured, live_tensors(model, optimizer))
    must(captured["m.down.weight"].spec.layout == Layout(Mesh((4,), (0, 1, 2, 3)), ((0, 1),)))
    must(captured["m.down.bias"].spec.layout.replica_count == 4)


def check_fsdp2_over_tensor_parallel(job: Job) -> None:
    model = two_dimensional()
    optimizer = trained(model)
    captured = found({"m": model, "o": optimizer})
    assert_boxes(job, captured, live_tensors(model, optimizer))
    # Tensor parallel (axis 1) cuts first, although FSDP is the first axis of the mesh.
    must(captured["m.up.weight"].spec.layout.splits == ((1, 0), (0, 0)))


def check_hybrid_sharding(job: Job) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Mlp(), mesh=mesh)
    optimizer = trained(model)
    captured = found({"m": model, "o": optimizer})
    assert_boxes(job, captured, live_tensors(model, optimizer))
    must(
        captured["m.up.weight"].spec.layout.replicas(job.rank)
        == ((0, 2) if job.rank % 2 == 0 else (1, 3))
    )


def check_three_dimensional_mesh(job: Job) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2))
    whole = torch.arange(70.0).view(7, 10)
    tensor = distribute_tensor(whole, mesh, [Shard(1), Replicate(), Shard(0)])
    captured = found({"t": tensor})["t"]
    must(captured.spec.layout.splits == ((2, 0), (0, 1)))
    box = captured.spec.layout.box((7, 10), job.rank)
    must(torch.equal(captured.tensor, piece(whole, box)))
    twice = distribute_tensor(whole, mesh, [Shard(0), Replicate(), Shard(0)])
    assert_boxes(job, found({"t": twice}), {"t": twice})


def check_data_parallel(job: Job) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = trained(wrapped)
    captured = found({"m": compiled(wrapped), "o": optimizer, "own": torch.ones(2)})
    live = live_tensors(model, optimizer)
    live |= {f"m.{name}": value for name, value in model.named_buffers()}
    own = captured.pop("own")
    assert_boxes(job, captured, live)
    must(own.spec.layout is None)
    must(captured["m.0.weight"].spec.layout == Layout(Mesh((4,), (0, 1, 2, 3))))
    must(captured["m.1.running_mean"].spec.eager)

    quiet = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    must(found({"m": quiet})["m.1.running_mean"].spec.layout is None)


def check_names_do_not_depend_on_wrappers(job: Job) -> None:
    expected = {f"m.{name}" for name, _ in Mlp().named_parameters()}
    model = Mlp()
    model.up, model.down = checkpoint_wrapper(model.up), compiled(model.down)
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    optimizer = trained(model)
    must(found({"m": model}).keys() == expected)
    state = found({"m": compiled(checkpoint_wrapper(model)), "o": optimizer})
    steps = {f"o.state.{name}.step" for name in expected}
    must(expected | steps <= state.keys())
    must(all(each.spec.layout for each in state.values()))


def check_sharded_between_forward_and_backward(job: Job) -> None:
    model = Mlp()
    for part in (model.up, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=False)
    optimizer = trained(model)
    before = live_tensors(model, optimizer)
    model(torch.ones(4, 5))
    must(not isinstance(model.up.weight, DTensor), "the parameters are gathered")
    captured = found({"m": model, "o": optimizer})
    assert_boxes(job, captured, before)


def check_ties_are_the_same_on_all_ranks(job: Job) -> None:
    model = nn.Module()
    model.one, model.other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.other.weight = model.one.weight
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    result = captured({"m": model, "again": model.one.weight})
    trees = job.gather(result.tree)
    must(trees == [trees[0]] * 4)
    must(result.tree["m"]["other.weight"] == {"$tensor": "m.one.weight"})
    must(len(result.tensors) == 3)


def check_changed_boxes_are_torn(job: Job) -> None:
    model = two_dimensional()
    optimizer = trained(model)
    weight = model.up.weight

    def in_place() -> None:
        with torch.no_grad():
            weight.add_(1)

    def on_the_local_tensor() -> None:
        weight.to_local().detach().add_(1)

    def step() -> None:
        trained(model, optimizer)

    for change in (in_place, on_the_local_tensor, step):
        result = captured({"m": model, "o": optimizer})
        must(result.moved(eager=False) is None)
        change()
        must(result.moved(eager=False) == "m.up.weight", change.__name__)

    foreach = torch.optim.AdamW(model.parameters(), foreach=True)
    trained(model, foreach)
    result = captured({"m": model, "o": foreach})
    trained(model, foreach)
    must(str(result.moved(eager=False)).endswith(".step"), "a foreach update shows there only")


def check_plain_optimizer_state_beside_shards(job: Job) -> None:
    model = fully_shard(Mlp(), mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.SGD(model.parameters())
    local = model.up.weight.to_local().detach().clone()
    optimizer.state[model.up.weight] = {
        "step": torch.tensor(3.0),
        "moment": local,
        "absmax": torch.full((3,), float(job.rank)),
    }
    captured = found({"m": model, "o": optimizer})
    specs = {key: captured[f"o.state.m.up.weight.{key}"].spec for key in ("step", "moment")}
    must(specs["step"].layout == Layout(Mesh((4,), (0, 1, 2, 3))))
    must(specs["moment"].layout == captured["m.up.weight"].spec.layout)
    must(specs["moment"].global_shape == (7, 5))
    must(captured["o.state.m.up.weight.absmax"].spec.layout is None)


def check_different_parameters_on_every_rank(job: Job) -> None:
    stage = nn.Linear(2, job.rank + 1)
    captured = found({"m": nn.ModuleDict({f"stage{job.rank}": stage})})
    must(captured.keys() == {f"m.stage{job.rank}.weight", f"m.stage{job.rank}.bias"})
    must(all(each.spec.layout is None for each in captured.values()))


def check_refusals(job: Job) -> None:
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(UnsupportedValueError, match=r"x\.partial") as refused:
        captured({"x": {"partial": DTensor.from_local(torch.ones(2), mesh, [Partial()])}})
    must("Partial" in str(refused.value))
    must("redistribute" in str(refused.value))
    odd = torch.ones(7 if job.rank == 3 else 1)
    odd = DTensor.from_local(odd, mesh, [Shard(0)], shape=torch.Size([10]), stride=(1,))
    with pytest.raises(UnsupportedValueError, match="local tensor has the shape"):
        captured({"odd": odd})
    flat = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedValueError, match=r"fully_shard") as refused:
        captured({"m": nn.Sequential(flat)})
    must(refused.value.facts["path"] == "m.0")
