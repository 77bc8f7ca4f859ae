"""A Checkpointer restores what the drop-in saved, and the other way round, on several ranks.

Three jobs, one after the other: `save` and `restore` on four ranks, `restore` on two. What a rank
saved for itself is its own again on as many ranks, and an error on any other number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import statehold
from statehold.errors import StateMismatchError
from statehold.integrations.dcp import StorageReader, StorageWriter, restore_stock
from support.dcp_checks import assert_same, failing, full, state_of, trained
from support.faults import must

STEP = "step-000000000007"


def save(rank: int, world_size: int, where: str) -> None:
    directory = Path(where)
    net, optimizer = trained(1, world_size, "2d")
    state = state_of(net, optimizer, step=7)
    for name, collectives in (("shared", True), ("alone", False)):
        dcp.save(
            {**state, "own": torch.full((3,), float(rank))} if name == "alone" else state,
            checkpoint_id=directory / name / STEP,
            storage_writer=StorageWriter(),
            use_collectives=collectives,
        )
    if rank == 0:
        torch.save({name: full(value) for name, value in _flat(state).items()}, directory / "whole")
    else:
        [full(value) for value in _flat(state).values()]  # a collective
    with statehold.Checkpointer(directory / "run", staging_bytes="32MiB") as ckpt:
        ckpt.save(7, {"model": net, "own": torch.full((4,), float(rank)), "seed": rank}).wait()


def restore(rank: int, world_size: int, where: str) -> None:
    directory = Path(where)
    for kind in ("fsdp", "2d"):
        _restored(directory / "shared", world_size, kind)
        _from_torch_save(directory / "whole", world_size, kind)
    _own(rank, world_size, directory)
    _loaded(rank, world_size, directory)


def _from_torch_save(path: Path, world_size: int, kind: str) -> None:
    """Whole tensors in one file, into shards of any layout: each rank reads what it holds."""
    live = _flat(state_of(*trained(2, world_size, kind), step=0))
    must(not restore_stock(path, live).missing)
    assert_same(torch.load(path), live)


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    found = flatten_state_dict(state)[0]
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _restored(run: Path, world_size: int, kind: str) -> None:
    """The state that was given to dcp, in any layout."""
    live = state_of(*trained(2, world_size, kind), step=0)
    with statehold.Checkpointer(run, staging_bytes="32MiB") as ckpt:
        must(ckpt.restore(live) == 7)
    must(live["step"] == 7)
    assert_same(torch.load(run.parent / "whole"), _flat(live))


def _own(rank: int, world_size: int, directory: Path) -> None:
    """With use_collectives=False a plain tensor is the rank's own."""
    live = {"own": torch.zeros(3), "model": trained(2, world_size, "fsdp")[0].state_dict()}
    with statehold.Checkpointer(directory / "alone", staging_bytes="32MiB") as ckpt:
        if world_size == 4:
            ckpt.restore(live, strict=False)
            must(torch.equal(live["own"], torch.full((3,), float(rank))))
        else:
            with failing() as caught:
                ckpt.restore(live, strict=False)
            must("own" in str(caught[0]))


def _loaded(rank: int, world_size: int, directory: Path) -> None:
    """A step of a Checkpointer, whose ranks saved tensors and values of their own besides."""
    for step in (directory / "run" / STEP, directory / "alone" / STEP):
        reader = StorageReader(step)
        plain = {"own": torch.zeros(_size_of(step))}
        if world_size == 4:
            dcp.load(plain, storage_reader=reader)
            must((plain["own"] == rank).all())
        else:
            _fails_to_load(plain, reader)
        for placement in (Shard(0), Replicate()):
            mesh = init_device_mesh("cpu", (world_size,))
            one = distribute_tensor(torch.full((_size_of(step),), -1.0), mesh, [placement])
            _fails_to_load({"own": one}, reader)
            must((one.to_local() == -1).all(), "what ranks saved each for itself was mixed")
    values = {"seed": -1}
    if world_size == 4:
        dcp.load(values, storage_reader=StorageReader(directory / "run" / STEP))
        must(values["seed"] == rank)
    else:
        _fails_to_load(values, StorageReader(directory / "run" / STEP))


def _size_of(step: Path) -> int:
    return 3 if step.parent.name == "alone" else 4


def _fails_to_load(state: dict[str, Any], reader: StorageReader) -> None:
    with failing() as caught:
        dcp.load(state, storage_reader=reader)
    must(any(isinstance(error, StateMismatchError) for error in caught), caught)
