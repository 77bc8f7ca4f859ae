"""What the ranks of tests/dcp do: every check is run on all ranks, and its outcome collected.

A check is a function (rank, world_size, directory) of this module whose name begins with check_;
it raises where it fails. They run in one process group, in order of their names.
"""

from __future__ import annotations

import contextlib
import io
import os
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from statehold.dcp import StorageReader, StorageWriter


def outcomes(rank: int, world_size: int, directory: str) -> dict[str, str]:
    """Traceback, or nothing, of every check."""
    warnings.simplefilter("ignore")
    found = {}
    for name, check in sorted(globals().items()):
        if name.startswith("check_"):
            try:
                check(rank, world_size, Path(directory) / name)
                found[name] = ""
            except BaseException:
                found[name] = traceback.format_exc()
            dist.barrier()
    return found


class Net(nn.Module):
    """Two linear layers between norms; odd sizes, so that shards are uneven."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 18)
        self.down = nn.Linear(18, 10)
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def trained(seed: int, world_size: int, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model after one step: "fsdp", or "2d" for FSDP over tensor parallelism."""
    net: nn.Module = Net(seed)
    if kind == "2d":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        net = parallelize_module(net, mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * seed)
    torch.manual_seed(100)
    net(torch.randn(4, 10)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": optim, "step": step, "names": ["a", ("b", 1.5)]}


def flat(state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state)[0]


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    left, right = flat(one), flat(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        a, b = full(value), full(right[name])
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name
        else:
            assert a == b, name


@contextlib.contextmanager
def failing() -> Iterator[list[BaseException]]:
    """Expects dcp to fail; collects what it raised, and what that wraps."""
    caught: list[BaseException] = []
    try:
        yield caught
    except BaseException as error:
        caught.append(error)
        caught += [fault for fault, _ in getattr(error, "failures", {}).values()]
    assert caught, "this must fail"


def save_and_load(world_size: int, kind: str, save_to: Any, load_from: Any) -> None:
    state = state_of(*trained(1, world_size, kind), step=7)
    save_to(state)
    net, optimizer = trained(2, world_size, kind)
    other = state_of(net, optimizer, step=0)
    load_from(other)
    assert_same(state, other)
    set_state_dict(net, optimizer, model_state_dict=other["model"], optim_state_dict=other["optimizer"])
    assert_same({**state, "step": 0}, state_of(net, optimizer, step=0))


# -- round trips -----------------------------------------------------------------------------------


def check_fsdp(rank: int, world_size: int, directory: Path) -> None:
    where = directory / "step-7"
    save_and_load(
        world_size,
        "fsdp",
        lambda state: dcp.save(state, checkpoint_id=where, storage_writer=StorageWriter()),
        lambda state: dcp.load(state, checkpoint_id=where, storage_reader=StorageReader()),
    )
    assert sorted(os.listdir(directory)) == ["step-7"]


def check_2d(rank: int, world_size: int, directory: Path) -> None:
    where = directory / "step-7"
    save_and_load(
        world_size,
        "2d",
        lambda state: dcp.save(state, storage_writer=StorageWriter(where)),
        lambda state: dcp.load(state, storage_reader=StorageReader(where)),
    )


def check_other_layout(rank: int, world_size: int, directory: Path) -> None:
    """What FSDP over tensor parallelism saved, FSDP alone loads, and the stock pair agrees."""
    state = state_of(*trained(1, world_size, "2d"), step=7)
    dcp.save(state, storage_writer=StorageWriter(directory / "ours"))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory / "stock"))
    ours = state_of(*trained(2, world_size, "fsdp"), step=0)
    stock = state_of(*trained(3, world_size, "fsdp"), step=0)
    dcp.load(ours, storage_reader=StorageReader(directory / "ours"))
    dcp.load(stock, storage_reader=dcp.FileSystemReader(directory / "stock"))
    assert_same(ours, stock)
    assert_same(ours, state)
