"""One format: what the drop-in saves a Checkpointer restores, and the other way round."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import statehold
from statehold.dcp import StorageReader, StorageWriter
from support.dcp_checks import Net

pytestmark = pytest.mark.filterwarnings("ignore")


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_a_checkpointer_restores_it(tmp_path: Path) -> None:
    net = Net(1)
    state = {"model": net.state_dict(), "epoch": 5, "order": [3, 1, 2]}
    dcp.save(state, checkpoint_id=tmp_path / "step-000000000007", storage_writer=StorageWriter())
    other = Net(2)
    live = {"model": other, "epoch": 0, "order": None}
    with statehold.Checkpointer(tmp_path, staging_bytes="32MiB") as ckpt:
        assert ckpt.restore(live) == 7
    same(net.state_dict(), other.state_dict())
    assert (live["epoch"], live["order"]) == (5, [3, 1, 2])


def test_it_loads_what_a_checkpointer_saved(tmp_path: Path) -> None:
    net = Net(1)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    with statehold.Checkpointer(tmp_path, staging_bytes="32MiB") as ckpt:
        ckpt.save(3, {"model": net, "optim": optimizer, "pair": (1, "b"), "epoch": 5})
    loaded = {
        "model": Net(2).state_dict(),
        "optim": {"state": {"model.up.weight": {"exp_avg": torch.zeros(18, 10)}}},
        "pair": None,
        "epoch": 0,
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "step-000000000003", storage_reader=StorageReader())
    same(net.state_dict(), loaded["model"])
    moment = loaded["optim"]["state"]["model.up.weight"]["exp_avg"]  # type: ignore[index]
    same(optimizer.state[net.up.weight]["exp_avg"], moment)
    assert (loaded["pair"], loaded["epoch"]) == ((1, "b"), 5)


def test_objects_without_flattening(tmp_path: Path) -> None:
    """A subtree is one object: for planners that do not flatten, tensors inside and all."""
    state = {"a": {"x": torch.arange(5.0), "y": (1, None)}, "b": torch.ones(3)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=StorageWriter(tmp_path), planner=planner)
    loaded: dict[str, Any] = {"a": None, "b": torch.zeros(3)}
    loading = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(loaded, storage_reader=StorageReader(tmp_path), planner=loading)
    assert loaded["b"].all()
    flat = {"a": {"x": torch.zeros(5)}}
    dcp.load(flat, storage_reader=StorageReader(tmp_path))
    same(state["a"]["x"], flat["a"]["x"])


def test_without_a_state_dict(tmp_path: Path) -> None:
    state = {"a": {"x": torch.arange(5.0), "n": [1, 2]}, "b": 2.5}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "c"))
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "c"))
    same(state["a"]["x"], found["a"]["x"])
    assert (found["a"]["n"], found["b"]) == ([1, 2], 2.5)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(6.0).view(2, 3)}, storage_writer=StorageWriter(tmp_path))
    loaded = {"a": torch.zeros(3, 2, dtype=torch.float64).t()}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path))
    same(torch.arange(6.0, dtype=torch.float64).view(2, 3), loaded["a"].contiguous())


def test_a_moved_checkpoint_loads(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "step-9"))
    (tmp_path / "step-9").rename(tmp_path / "best")
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "best"))
    assert loaded["a"].all()


def test_both_can_be_pickled_after_use(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "c"), StorageReader(tmp_path / "c")
    writer.stage({"a": torch.ones(3)})
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    copy = pickle.loads(pickle.dumps(writer))
    dcp.save({"a": torch.full((3,), 2.0)}, storage_writer=copy)
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, storage_reader=pickle.loads(pickle.dumps(reader)))
    same(torch.full((3,), 2.0), loaded["a"])


def test_staged_memory_is_not_used_while_a_save_reads_it() -> None:
    writer = StorageWriter()
    first = writer.stage({"a": torch.ones(1000)})
    second = writer.stage({"a": torch.zeros(1000)})
    assert first["a"].all()
    place = second["a"].data_ptr()
    del second
    assert writer.stage({"a": torch.ones(1000)})["a"].data_ptr() != first["a"].data_ptr()
    assert place
    writer.close()
