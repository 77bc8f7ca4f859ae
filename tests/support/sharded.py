"""Models whose parameters are sharded over ranks, in a job of four.

Invariants: a layout on n ranks is that of the first n ranks of the job, or of all its groups of n.
Meshes are made once: a process group takes long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from statehold.tensors.storable import local_of
from support.twins import same_bits

# Larger than CUT on each rank, with rows that end within it; and 3 rows, so the last of 4 has none.
WIDE, ROWS, FEW = 300, 173, 3

Make = Callable[[torch.dtype], nn.Module]


class Net(nn.Module):
    """Two layers; by default, of sizes that no mesh divides."""

    def __init__(self, dtype: torch.dtype, rows: int = ROWS, few: int = FEW) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, rows, dtype=dtype)
        self.down = nn.Linear(rows, few, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def even(dtype: torch.dtype) -> nn.Module:
    """Sizes with which tensor parallel layers can compute."""
    return Net(dtype, 184, 4)


@functools.cache
def groups_of(ranks: int) -> DeviceMesh:
    """This rank's mesh, where the job falls into meshes of so many ranks."""
    mesh = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("others", "own"))
    return mesh["own"]


@functools.cache
def first(ranks: int) -> DeviceMesh:
    """The mesh of the first ranks. All ranks of the job call this."""
    return DeviceMesh("cpu", list(range(ranks)))


@functools.cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def fsdp(mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    model = Net(dtype)
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def both(model: nn.Module) -> nn.Module:
    """fully_shard over tensor parallel."""
    return fully_shard(tensor_parallel(model, square()["tp"]), mesh=square()["dp"])


def partly(model: nn.Module) -> nn.Module:
    """One layer under both, and the other under fully_shard alone, once for each tensor rank."""
    model = parallelize_module(model, square()["tp"], {"up": ColwiseParallel()})
    return fully_shard(model, mesh=square()["dp"])


def replicated(dtype: torch.dtype) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net(dtype))


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """What one rank would have; all ranks of its mesh call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_local_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits on this rank, and equal placements."""
    if isinstance(one, DTensor) != isinstance(other, DTensor) or one.shape != other.shape:
        return False
    if isinstance(one, DTensor) and one.placements != other.placements:
        return False
    return same_bits(local_of(one), local_of(other))
