"""Both sums on ranks with Gloo: replicas of one rank, and of two ranks that share a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from statehold.resilience.sums.exact import ExactSum
from statehold.resilience.sums.fast import FastSum
from statehold.resilience.sums.norm import clip_by_norm
from statehold.tensors.storable import local_of
from support.columns import Column, bits_of
from support.gloo import run_ranks

pytestmark = pytest.mark.thorough

M = 8
RANKS = 4
STEPS = 2


def model_of(mesh: DeviceMesh | None) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))
    return model if mesh is None else fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
    made = torch.Generator().manual_seed(step * M + index)
    return model(torch.randn((5, 6), generator=made)).exp().square().sum()


def column(group: Any) -> Callable[[Tensor], Any]:
    def start(tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=group, async_op=True)

    return start


def alone(tensor: Tensor) -> Any:
    return Column(1).start(0)(tensor)


def train(
    kind: Any, mesh: DeviceMesh | None, share: Iterable[int], start: Any, gather: Any
) -> list[Any]:
    """The bits of gradients, losses and norms of each step; SGD between them."""
    model = model_of(mesh)
    sums = kind(model.named_parameters(), M)
    found = []
    share = list(share)
    for step in range(STEPS):
        sums.begin()
        for index in share:
            sums.watch(start if index == share[-1] else None)
            loss = loss_of(model, step, index)
            loss.backward()
            sums.count(index, loss)
        sums.reduce(start)
        sums.finish()
        norm = clip_by_norm(model.parameters(), 3.0, gather)
        found.append(
            [sums.finished.losses, sums.finished.mean_loss, norm, *map(bits_of, locals_of(model))]
        )
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    return found


def locals_of(model: nn.Module) -> list[Tensor]:
    return [local_of(param.grad) for param in model.parameters() if param.grad is not None]


def gather_on(group: Any) -> Callable[[float], list[float]]:
    def gather(mine: float) -> list[float]:
        told: list[float] = [math.nan] * dist.get_world_size(group)
        dist.all_gather_object(told, mine, group)
        return told

    return gather


def work(rank: int, ranks: int) -> list[Any]:
    def itself(mine: float) -> list[float]:
        return [mine]

    everyone = column(dist.group.WORLD)
    plain = [
        train(ExactSum, None, range(rank, M, ranks), everyone, itself),
        train(ExactSum, None, range(M), alone, itself),
        train(FastSum, None, range(rank, M, ranks), everyone, itself),
    ]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
    row, replica = mesh["row"], mesh.get_local_rank("column")
    of_column, gather = column(mesh.get_group("column")), gather_on(mesh.get_group("row"))
    return [
        *plain,
        train(ExactSum, row, range(replica, M, 2), of_column, gather),
        train(ExactSum, row, range(M), alone, gather),
        train(FastSum, row, range(replica, M, 2), of_column, gather),
    ]


def test_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    """As four replicas, as two replicas of two ranks, and as replicas that compute all alone."""
    told = run_ranks(work, RANKS, tmp_path)
    for rank, (exact, exact_alone, fast, rows, rows_alone, rows_fast) in enumerate(told):
        assert exact == exact_alone == told[0][0]
        assert fast == told[0][2]
        assert rows == rows_alone == told[rank % 2][3]
        assert rows_fast == told[rank % 2][5]
        assert len({len(each) for each in (exact[0], fast[0], rows[0])}) == 1
        for near in (fast, rows, rows_fast):
            assert math.isclose(near[0][1], exact[0][1], rel_tol=1e-5)
            assert math.isclose(near[1][2], exact[1][2], rel_tol=1e-4)
