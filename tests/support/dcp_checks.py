"""What the ranks of tests/dcp do: every check is run on all ranks, and its outcome collected.

A check is a function (rank, world_size, directory) of this module whose name begins with check_;
it raises where it fails. They run in one process group, in order of their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from statehold.errors import MissingFileError, PeerFailedError, UnsupportedValueError
from statehold.integrations.dcp import StorageReader, StorageWriter, restore_stock, writer
from support.faults import DEADLINE_S, must


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
    """A sharded model after one step: "fsdp", "hsdp", or "2d" for FSDP over tensor parallelism."""
    net: nn.Module = Net(seed)
    if kind == "2d":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        net = parallelize_module(net, mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])
    elif kind == "hsdp":
        names = ("replicate", "shard")
        fully_shard(net, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names))
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
    must(left.keys() == right.keys())
    for name, value in left.items():
        a, b = full(value), full(right[name])
        if isinstance(a, torch.Tensor):
            must(a.dtype == b.dtype, name)
            must(torch.equal(a, b), name)
        else:
            must(a == b, name)


@contextlib.contextmanager
def failing() -> Iterator[list[BaseException]]:
    """Expects dcp to fail; collects what it raised, and what that wraps."""
    caught: list[BaseException] = []
    try:
        yield caught
    except BaseException as error:
        caught.append(error)
        caught += [fault for fault, _ in getattr(error, "failures", {}).values()]
    must(caught, "this must fail")


def save_and_load(world_size: int, kind: str, save_to: Any, load_from: Any) -> None:
    state = state_of(*trained(1, world_size, kind), step=7)
    save_to(state)
    net, optimizer = trained(2, world_size, kind)
    other = state_of(net, optimizer, step=0)
    load_from(other)
    assert_same(state, other)
    model, optim = other["model"], other["optimizer"]
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
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
    must(sorted(os.listdir(directory)) == ["step-7"])


def check_2d(rank: int, world_size: int, directory: Path) -> None:
    where = directory / "step-7"
    save_and_load(
        world_size,
        "2d",
        lambda state: dcp.save(state, storage_writer=StorageWriter(where)),
        lambda state: dcp.load(state, storage_reader=StorageReader(where)),
    )


def check_hsdp(rank: int, world_size: int, directory: Path) -> None:
    save_and_load(
        world_size,
        "hsdp",
        lambda state: dcp.save(state, storage_writer=StorageWriter(directory)),
        lambda state: dcp.load(state, storage_reader=StorageReader(directory)),
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


def check_odd_tensors(rank: int, world_size: int, directory: Path) -> None:
    """Uneven and empty shards, replicas, scalars, other dtypes, views, packed and complex ones."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(3)
    wide = torch.randn(3, 7)  # three rows on four ranks: the last has none

    def state(scale: float) -> dict[str, Any]:
        return {
            "uneven": distribute_tensor(wide * scale, mesh, [Shard(0)]),
            "columns": distribute_tensor(wide.double() * scale, mesh, [Shard(1)]),
            "replicated": distribute_tensor(wide * scale, mesh, [Replicate()]),
            "scalar": torch.tensor(2.5 * scale),
            "empty": torch.empty(0, 4),
            "view": (wide * scale).t()[1:5:2],
            "half": (wide * scale).to(torch.bfloat16),
            "complex": torch.complex(wide * scale, wide).conj(),
            "eight": (wide * scale).to(torch.float8_e4m3fn),
        }

    saved, loaded = state(1.0), state(0.0)
    dcp.save(saved, storage_writer=StorageWriter(directory))
    dcp.load(loaded, storage_reader=StorageReader(directory))
    for name, value in saved.items():
        a, b = full(value), full(loaded[name])
        must(a.dtype == b.dtype, name)
        must(torch.equal(a.float() if name == "eight" else a, b.float() if name == "eight" else b))


def check_each_rank_writes(rank: int, world_size: int, directory: Path) -> None:
    """What all ranks hold is written once, by different ranks; every rank has a file."""
    state = {f"w{i}": torch.full((64, 64), float(i)) for i in range(2 * world_size)}
    dcp.save(state, storage_writer=StorageWriter(directory))
    dist.barrier()
    sizes = [os.path.getsize(path) for path in directory.glob("*.safetensors")]
    must(len(sizes) == world_size)
    must(sum(sizes) < 2 * world_size * (64 * 64 * 4) + world_size * 8192)
    must(max(sizes) <= 2 * (64 * 64 * 4) + 4096)


def check_stock_readers(rank: int, world_size: int, directory: Path) -> None:
    """Sharded files open with safetensors and with the stock Hugging Face reader."""
    from safetensors import safe_open

    net, _ = trained(1, world_size, "2d")
    state = net.state_dict()
    dcp.save(state, storage_writer=StorageWriter(directory))
    other = trained(2, world_size, "fsdp")[0].state_dict()
    dcp.load(other, storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    assert_same(state, other)
    (own,) = directory.glob(f"rank-{rank:05d}-*.safetensors")
    with safe_open(own, "pt") as file:
        must(set(file.keys()) <= set(state))
        must(all(file.get_tensor(name).numel() for name in file.keys()))  # noqa: SIM118


def check_for_one(rank: int, world_size: int, directory: Path) -> None:
    """What test_ranks.py restores on one rank, with a Checkpointer."""
    state = {"model": trained(1, world_size, "2d")[0].state_dict(), "n": 5}
    dcp.save(state, checkpoint_id=directory / "step-000000000007", storage_writer=StorageWriter())
    whole = {name: full(value) for name, value in state["model"].items()}
    if rank == 0:
        torch.save(whole, directory / "whole.pt")


# -- planners --------------------------------------------------------------------------------------


class HalvingPlanner(dcp.DefaultSavePlanner):
    """Cuts every tensor of two rows or more in two: several chunks of a name on a rank."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [half for item in plan.items for half in self._halves(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _halves(self, item: Any) -> list[Any]:
        data = item.tensor_data
        if data is None or not data.chunk.sizes or data.chunk.sizes[0] < 2:
            return [item]
        found = []
        rows = data.chunk.sizes[0]
        for low, high in ((0, rows // 2), (rows // 2, rows)):
            offsets = (data.chunk.offsets[0] + low, *data.chunk.offsets[1:])
            chunk = dataclasses.replace(
                data.chunk,
                offsets=torch.Size(offsets),
                sizes=torch.Size((high - low, *data.chunk.sizes[1:])),
            )
            index = dataclasses.replace(item.index, offset=torch.Size(offsets))
            data = dataclasses.replace(data, chunk=chunk)
            kind = WriteItemType.SHARD
            found.append(dataclasses.replace(item, index=index, type=kind, tensor_data=data))
        return found

    def resolve_data(self, item: Any) -> Any:
        value = self.state_dict[item.index.fqn]
        if not isinstance(value, torch.Tensor):
            return super().resolve_data(item)
        chunk, base = item.tensor_data.chunk, 0
        if isinstance(value, DTensor):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(
                value.shape, value.device_mesh, value.placements
            )
            base = offset[0] if offset else 0
            value = value.to_local()
        if not chunk.sizes:
            return value
        return value.narrow(0, chunk.offsets[0] - base, chunk.sizes[0])


def check_several_chunks(rank: int, world_size: int, directory: Path) -> None:
    """A rank with two chunks of a tensor has two files, which stock readers read as well."""
    state = state_of(*trained(1, world_size, "fsdp"), step=7)
    dcp.save(state, storage_writer=StorageWriter(directory), planner=HalvingPlanner())
    other = state_of(*trained(2, world_size, "2d"), step=0)
    dcp.load(other, storage_reader=StorageReader(directory))
    assert_same(state, other)
    must(list(directory.glob("rank-*-1.safetensors")))
    weights = {"model": trained(3, world_size, "fsdp")[0].state_dict()}
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    assert_same(weights["model"], state["model"])


def check_cached_plans(rank: int, world_size: int, directory: Path) -> None:
    """A planner that caches plans hands out those of an earlier save."""
    net, optimizer = trained(1, world_size, "fsdp")
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(step)
        state = state_of(net, optimizer, step=7)
        dcp.save(
            state,
            checkpoint_id=directory / f"step-{step}",
            storage_writer=StorageWriter(),
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
        )
        other = state_of(*trained(2, world_size, "fsdp"), step=0)
        dcp.load(other, storage_reader=StorageReader(directory / f"step-{step}"))
        assert_same(state, other)


def check_partial_load(rank: int, world_size: int, directory: Path) -> None:
    net, optimizer = trained(1, world_size, "fsdp")
    dcp.save(state_of(net, optimizer, step=7), storage_writer=StorageWriter(directory))
    more = {"model": trained(2, world_size, "fsdp")[0].state_dict(), "new": torch.ones(3)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(more, storage_reader=StorageReader(directory), planner=planner)
    must(torch.equal(more["new"], torch.ones(3)))
    assert_same(more["model"], net.state_dict())
    with failing() as caught:
        dcp.load({"new": torch.ones(3)}, storage_reader=StorageReader(directory))
    must("new" in str(caught[1]))


# -- async -----------------------------------------------------------------------------------------


def check_async(rank: int, world_size: int, directory: Path) -> None:
    """Saved is the state at the call, on a thread, with staging memory used again."""
    _async_saves(world_size, directory, ["THREAD"] * 3)


def async_in_a_process(rank: int, world_size: int, directory: str) -> None:
    """The same in the process that torch starts on every rank; each imports torch anew."""
    _async_saves(world_size, Path(directory), ["PROCESS"] * 2)


def _async_saves(world_size: int, directory: Path, kinds: list[str]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    writer = StorageWriter()
    for step, kind in enumerate(kinds):
        net, optimizer = trained(step + 1, world_size, "fsdp")
        state = state_of(net, optimizer, step)
        # Before the save, which does collectives on a thread of its own.
        expected = {name: full(value).clone() for name, value in net.state_dict().items()}
        where = directory / f"step-{step}"
        saving = dcp.async_save(
            state,
            checkpoint_id=where,
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType[kind],
        )
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        saving.result()
        other = trained(9, world_size, "fsdp")[0].state_dict()
        loaded = {"model": other, "step": None}
        dcp.load(loaded, storage_reader=StorageReader(where))
        must(loaded["step"] == step)
        assert_same(other, expected)
    writer.close()


# -- failures --------------------------------------------------------------------------------------


class FailsOn(dcp.DefaultSavePlanner):
    """A planner whose data cannot be had on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, item: Any) -> Any:
        if dist.get_rank() == self.rank:
            raise OSError(28, "injected: no space")
        return super().resolve_data(item)


class FailsFirst(FailsOn):
    """As FailsOn, and the other ranks begin once the files of all are gone."""

    def __init__(self, rank: int, directory: Path) -> None:
        super().__init__(rank)
        self.directory = directory

    def finish_plan(self, new_plan: Any) -> Any:
        end_s = time.monotonic() + DEADLINE_S
        while dist.get_rank() != self.rank and os.listdir(self.directory):
            must(time.monotonic() < end_s)
        return super().finish_plan(new_plan)


def check_failed_rank(rank: int, world_size: int, directory: Path) -> None:
    """A save that fails anywhere fails everywhere, and leaves the older checkpoint as it was."""
    where = directory / "step-7"
    state = state_of(*trained(1, world_size, "fsdp"), step=7)
    dcp.save(state, checkpoint_id=where, storage_writer=StorageWriter())
    newer = state_of(*trained(2, world_size, "fsdp"), step=8)
    for culprit in (0, world_size - 1):
        with failing() as caught:
            dcp.save(
                newer, checkpoint_id=where, storage_writer=StorageWriter(), planner=FailsOn(culprit)
            )
        must(any(isinstance(each, OSError) for each in caught))
        dist.barrier()
        must(os.listdir(directory) == ["step-7"], "a rank that fails gives back all room")
        dist.barrier()
    other = state_of(*trained(3, world_size, "fsdp"), step=0)
    dcp.load(other, storage_reader=StorageReader(where))
    assert_same(state, other)
    dcp.save(newer, checkpoint_id=where, storage_writer=StorageWriter())
    dcp.load(other, storage_reader=StorageReader(where))
    assert_same(newer, other)


def check_missing_file(rank: int, world_size: int, directory: Path) -> None:
    """Defect 4 of the stock Hugging Face reader: the first shard is missing, zeros are loaded."""
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])}
    empty = {"w": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=StorageWriter(directory / "ours"))
    stock = dcp.HuggingFaceStorageWriter(str(directory / "stock"), save_distributed=True)
    dcp.save(state, storage_writer=stock)
    dist.barrier()
    if rank == 0:
        for first in (*(directory / "ours").glob("rank-00000*.safetensors"),
                      *(directory / "stock").glob("shard-00001*.safetensors")):  # fmt: skip
            first.unlink()
    dist.barrier()
    dcp.load(empty, storage_reader=dcp.HuggingFaceStorageReader(str(directory / "stock")))
    must(not full(empty["w"])[:2].any(), "the stock reader no longer has defect 4")
    with failing() as caught:
        dcp.load(empty, storage_reader=StorageReader(directory / "ours"))
    must(isinstance(caught[1], MissingFileError))
    must(isinstance(caught[1], Exception))


class Between(StorageReader):
    """Rank 0 opens a checkpoint; another save takes its place; then the other ranks open it."""

    rank = 0
    replaced_by: Path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        found = super().read_metadata() if self.rank == 0 else None
        dist.barrier()
        if self.rank == 0:
            final = Path(str(self.checkpoint_id))
            final.rename(final.with_name("gone"))
            self.replaced_by.rename(final)
        dist.barrier()
        return found or super().read_metadata()


def check_saved_again(rank: int, world_size: int, directory: Path) -> None:
    """Ranks that have opened different saves do not load both."""
    where, other = directory / "step-7", directory / "other-7"
    for path, value in ((where, 1.0), (other, 2.0)):
        dcp.save({"w": torch.full((8,), value)}, storage_writer=StorageWriter(path))
    dist.barrier()
    live = {"w": torch.zeros(8)}
    reader = Between(where)
    reader.rank, reader.replaced_by = rank, other
    with failing() as caught:
        dcp.load(live, storage_reader=reader)
    must("different saves" in str(caught[1]), caught)
    must(not live["w"].any(), "nothing was loaded")
    dcp.load(live, storage_reader=StorageReader(where))
    must(live["w"].eq(2).all())


def check_stock(rank: int, world_size: int, directory: Path) -> None:
    """What the stock writers saved under one layout, restored into another, optimizer included."""
    net, optimizer = trained(1, world_size, "2d")
    state = state_of(net, optimizer, step=7)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory / "dcp"))
    other = trained(2, world_size, "fsdp")
    live: dict[str, Any] = {"model": other[0], "optimizer": other[1], "step": 0, "names": None}
    report = restore_stock(directory / "dcp", live)
    must(not report.missing)
    must(not [name for name in report.unexpected if ".params" not in name])
    assert_same(state, state_of(*other, step=live["step"]))
    hf = dcp.HuggingFaceStorageWriter(str(directory / "hf"), save_distributed=True)
    dcp.save(net.state_dict(), storage_writer=hf)
    third = trained(3, world_size, "fsdp")[0]
    report = restore_stock(directory / "hf", {"model": third})
    must(len(report.loaded) == len(net.state_dict()))
    assert_same(net.state_dict(), third.state_dict())


def check_stock_error_of_one_rank(rank: int, world_size: int, directory: Path) -> None:
    """What one rank cannot fill is an error on all ranks: none goes on alone."""
    path = directory / "weights.pt"
    if rank == 0:
        directory.mkdir()
        torch.save({"w": torch.ones(4)}, path)
    dist.barrier()
    live = torch.zeros(1).expand(4) if rank == 1 else torch.zeros(4)
    caught = None
    try:
        restore_stock(path, {"w": live})
    except RuntimeError as error:
        caught = error
    must("single memory location" in str(caught), caught)
    if hasattr(caught, "add_note"):  # Python 3.11 and later
        must("rank 1 could not" in str(getattr(caught, "__notes__", "")), "the rank is not told")


def check_stock_refuses_before_it_fills(rank: int, world_size: int, directory: Path) -> None:
    """A tensor that has no place in the checkpoint is refused while nothing is filled."""
    path = directory / "weights.pt"
    if rank == 0:
        directory.mkdir()
        torch.save({"first": torch.ones(4), "sums": torch.ones(4)}, path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (world_size,))
    first, sums = torch.zeros(4), DTensor.from_local(torch.zeros(4), mesh, [Partial()])
    caught = None
    try:
        restore_stock(path, {"first": first, "sums": sums})
    except UnsupportedValueError as error:
        caught = error
    must(not first.any(), "a tensor was filled before the refusal")
    must(caught is not None and caught.facts.get("rank") == 0, caught)


# -- use_collectives=False -------------------------------------------------------------------------


def check_no_collectives(rank: int, world_size: int, directory: Path) -> None:
    """Each rank gets its own values back; sharded tensors are whole, in any layout."""
    where = directory / "step-7"
    state = state_of(*trained(1, world_size, "2d"), step=100 + rank)
    state["own"] = torch.full((3,), float(rank))
    dcp.save(state, checkpoint_id=where, storage_writer=StorageWriter(), use_collectives=False)
    other = state_of(*trained(2, world_size, "fsdp"), step=0)
    other["own"] = torch.zeros(3)
    dcp.load(other, storage_reader=StorageReader(where))
    must(other["step"] == 100 + rank)
    assert_same(state, other)
    must(os.listdir(directory) == ["step-7"])


def check_no_collectives_again(rank: int, world_size: int, directory: Path) -> None:
    """What an earlier save to the same place left, good or failed, is not taken for new."""
    mesh = init_device_mesh("cpu", (world_size,))

    def state(value: int) -> dict[str, Any]:
        whole = torch.full((8,), float(value))
        return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": value + rank}

    for value, culprit in ((1, None), (2, 1), (3, None), (4, None)):
        planner = dcp.DefaultSavePlanner() if culprit is None else FailsOn(culprit)
        writer = StorageWriter(directory / "step-7", timeout_s=60.0)
        with failing() if culprit is not None else contextlib.nullcontext():
            dcp.save(state(value), storage_writer=writer, planner=planner, use_collectives=False)
        loaded = state(0)
        dist.barrier()
        dcp.load(loaded, storage_reader=StorageReader(directory / "step-7"))
        expected = 1 if culprit is not None else value
        assert_same(loaded, state(expected))
        must(os.listdir(directory) == ["step-7"])
        dist.barrier()


def check_no_collectives_failed(rank: int, world_size: int, directory: Path) -> None:
    """A rank that fails fails the save on all ranks, and nothing is published."""
    fails_everywhere(rank, world_size, directory, FailsOn(world_size - 1))


def check_no_collectives_failed_first(rank: int, world_size: int, directory: Path) -> None:
    """Also on ranks that have not begun to write when it has removed their directory."""
    fails_everywhere(rank, world_size, directory, FailsFirst(world_size - 1, directory))


def fails_everywhere(rank: int, world_size: int, directory: Path, planner: FailsOn) -> None:
    state = state_of(*trained(1, world_size, "fsdp"), step=7)
    last = world_size - 1
    try:
        dcp.save(
            state,
            checkpoint_id=directory / "step-7",
            storage_writer=StorageWriter(timeout_s=60.0),
            planner=planner,
            use_collectives=False,
        )
    except OSError:
        must(rank == last)
    except PeerFailedError as error:
        said = str(error)
        must(rank != last)
    else:
        raise AssertionError("this must fail")
    must(rank == last or "injected" in said)
    dist.barrier()
    must(not os.listdir(directory))


def check_no_collectives_without_a_record(rank: int, world_size: int, directory: Path) -> None:
    """A rank that cannot leave its record, after its files, fails the save on all ranks at once."""

    def boom(*_: Any) -> Any:
        raise OSError(28, "injected: no space")

    last = world_size - 1
    patched = mock.patch.object(writer, "hand_over", boom if rank == last else writer.hand_over)
    with patched, failing() as caught:
        dcp.save(
            {"n": rank, "w": torch.ones(8)},
            checkpoint_id=directory / "step-7",
            storage_writer=StorageWriter(timeout_s=60.0),
            use_collectives=False,
        )
    must(isinstance(caught[0], OSError if rank == last else PeerFailedError), caught)
    must("injected" in str(caught[0]), caught)
    dist.barrier()
    must(not os.listdir(directory))
