"""One format: what the drop-in saves a Checkpointer restores, and the other way round."""

from __future__ import annotations

import errno
import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import statehold
from statehold import Io
from statehold.integrations.dcp import StorageReader, StorageWriter
from support.dcp_checks import Net, failing
from support.endpoints import machine_of
from support.faults import DEADLINE_S, must
from support.in_memory import SimFs

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_a_checkpointer_restores_it(tmp_path: Path) -> None:
    net = Net(1)
    state = {"model": net.state_dict(), "epoch": 5, "order": [3, 1, 2]}
    dcp.save(state, checkpoint_id=tmp_path / "step-000000000007", storage_writer=StorageWriter())
    other = Net(2)
    live = {"model": other, "epoch": 0, "order": None}
    with statehold.Checkpointer(tmp_path, staging_bytes="32MiB") as ckpt:
        got = ckpt.restore(live)
        assert got == 7
    assert_equal(net.state_dict(), other.state_dict())
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
    assert_equal(net.state_dict(), loaded["model"])
    moment = loaded["optim"]["state"]["model.up.weight"]["exp_avg"]  # type: ignore[index]
    assert_equal(optimizer.state[net.up.weight]["exp_avg"], moment)
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
    assert_equal(state["a"]["x"], flat["a"]["x"])


def test_without_a_state_dict(tmp_path: Path) -> None:
    state = {"a": {"x": torch.arange(5.0), "n": [1, 2]}, "b": 2.5}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "c"))
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "c"))
    assert_equal(state["a"]["x"], found["a"]["x"])
    assert (found["a"]["n"], found["b"]) == ([1, 2], 2.5)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(6.0).view(2, 3)}, storage_writer=StorageWriter(tmp_path))
    loaded = {"a": torch.zeros(3, 2, dtype=torch.float64).t()}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path))
    assert_equal(torch.arange(6.0, dtype=torch.float64).view(2, 3), loaded["a"].contiguous())


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
    assert_equal(torch.full((3,), 2.0), loaded["a"])


def test_staged_memory_is_not_used_while_a_save_reads_it() -> None:
    writer = StorageWriter()
    live = {"a": torch.ones(1000)}
    first = writer.stage(live)
    live["a"].zero_()
    second = writer.stage(live)
    assert first["a"].all()
    place = second["a"].data_ptr()
    del second
    third = writer.stage(live)
    assert third["a"].data_ptr() == place != first["a"].data_ptr()
    writer.close()


class Waiting(dcp.DefaultSavePlanner):
    """A planner that says when it is asked for a plan, and makes it when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def create_local_plan(self) -> Any:
        self.asked.set()
        must(self.may.wait(DEADLINE_S))
        return super().create_local_plan()


def test_a_save_that_begins_before_another_ends(tmp_path: Path) -> None:
    """One writer, two saves: each goes to its own directory."""
    writer, planner = StorageWriter(), Waiting()
    one, two = tmp_path / "step-1", tmp_path / "step-2"
    first = dcp.async_save(
        {"a": torch.ones(3)}, checkpoint_id=one, storage_writer=writer, planner=planner
    )
    must(planner.asked.wait(DEADLINE_S))
    second = dcp.async_save({"a": torch.zeros(3)}, checkpoint_id=two, storage_writer=writer)
    second.result()
    planner.may.set()
    first.result()
    for path, value in ((one, 1.0), (two, 0.0)):
        loaded = {"a": torch.full((3,), -1.0)}
        dcp.load(loaded, storage_reader=StorageReader(path))
        assert_equal(torch.full((3,), value), loaded["a"])


def test_a_failed_save_may_be_collected_while_the_next_one_makes_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its traceback is a cycle with its state, so the collector drops both, at any allocation."""

    class Collecting(DefaultStager):
        def __init__(self, *options: Any) -> None:
            gc.collect()
            super().__init__(*options)

    monkeypatch.setattr("statehold.integrations.dcp.writer.DefaultStager", Collecting)
    writer, done = StorageWriter(), threading.Event()
    failed: list[Any] = [writer.stage({"a": torch.ones(3)})]
    failed.append(failed)
    del failed
    found: list[Any] = []

    def save() -> None:
        found.append(writer.stage({"a": torch.zeros(3)}))
        done.set()

    threading.Thread(target=save, daemon=True).start()
    must(done.wait(DEADLINE_S))
    assert_equal(torch.zeros(3), found[0]["a"])


@pytest.fixture
def _no_cached_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        monkeypatch.setattr(SavePlanner, name, {})


@pytest.mark.usefixtures("_no_cached_plans")
def test_a_cached_plan_of_a_failed_save(tmp_path: Path) -> None:
    """The plan names the directory of the failed attempt, which is still there."""
    fs = SimFs(1)
    fs.mkdir("/run")

    def save(path: str, value: float, rows: int = 3) -> None:
        writer = StorageWriter(path, io=Io(backend="threads"))
        machine_of(writer).borrowed_fs = fs
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.full((rows,), value)}, storage_writer=writer, planner=planner)

    fs.fail_next("write", errno.ENOSPC)
    with failing():
        save("/run/step-1", 1.0)
    save("/run/step-2", 2.0)
    save("/run/step-3", 3.0, rows=5)  # the plan is another now
    assert not fs.is_dir("/run/step-1")
    for path, value, rows in (("/run/step-2", 2.0, 3), ("/run/step-3", 3.0, 5)):
        reader = StorageReader(path, io=Io(backend="threads"))
        machine_of(reader).borrowed_fs = fs
        loaded = {"a": torch.zeros(rows)}
        dcp.load(loaded, storage_reader=reader)
        assert_equal(torch.full((rows,), value), loaded["a"])
