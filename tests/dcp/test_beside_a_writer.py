"""Loads of torch.distributed.checkpoint beside a writer that saves a step again, or retires it.

What is loaded is one of the two saves, or the error says that the step was saved again. Nothing is
called damaged, nothing is renamed. Also: replacing, where two names cannot be exchanged.
"""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from statehold import Io
from statehold.errors import CorruptionError, StorageError
from statehold.integrations.dcp import StorageReader, StorageWriter
from support.dcp_checks import failing
from support.endpoints import machine_of
from support.in_memory import SimFs

pytestmark = pytest.mark.filterwarnings("ignore")

STEP = "/run/step-7"
ASIDE = f"{STEP}.replaced"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300, 500), value), "n": int(value)}


def on(fs: SimFs, kind: Any) -> Any:
    found = kind(STEP, io=Io(backend="threads"))
    machine_of(found).borrowed_fs = fs
    return found


def saved(fs: SimFs, value: float) -> None:
    dcp.save(state(value), storage_writer=on(fs, StorageWriter))


def loaded(fs: SimFs, reader: Any = None) -> tuple[float, int]:
    live = state(0)
    dcp.load(live, storage_reader=reader or on(fs, StorageReader))
    assert len(live["w"].unique()) == 1
    return float(live["w"][0, 0]), live["n"]


@pytest.fixture
def fs() -> SimFs:
    fs = SimFs(1)
    fs.mkdir("/run")
    saved(fs, 1)
    return fs


class Late(StorageReader):
    """Something happens after the metadata was read, before the data is."""

    act: Callable[[], object]

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        self.act()
        return super().read_data(plan, planner)


def test_a_step_that_is_saved_again_while_it_is_loaded(fs: SimFs) -> None:
    reader = on(fs, Late)
    reader.act = lambda: saved(fs, 2)
    with failing() as caught:
        loaded(fs, reader)
    error = caught[1]
    assert isinstance(error, StorageError)
    assert not isinstance(error, CorruptionError)
    assert error.errno == errno.ESTALE
    assert "it was saved again" in str(error)
    assert "nothing is damaged" in str(error)
    assert [name for name, _ in fs.listdir("/run")] == ["step-7"]
    assert loaded(fs) == (2, 2)


def test_a_step_that_is_given_up_while_it_is_loaded(fs: SimFs) -> None:
    reader = on(fs, Late)
    reader.act = lambda: fs.rename(STEP, f"{STEP}.retired")
    with failing() as caught:
        loaded(fs, reader)
    assert isinstance(caught[1], StorageError)
    assert "it was retired" in str(caught[1])


def test_damage_is_still_damage(fs: SimFs) -> None:
    reader = on(fs, Late)
    (data,) = [name for name, _ in fs.listdir(STEP) if name.endswith(".safetensors")]
    reader.act = lambda: fs.corrupt(f"{STEP}/{data}", fs.stat_bytes(f"{STEP}/{data}") - 9, 4)
    with failing() as caught:
        loaded(fs, reader)
    assert isinstance(caught[1], CorruptionError)


def test_metadata_is_of_one_save(fs: SimFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest and the records of several ranks' saves: read anew where they do not match."""
    read, paths = SimFs.read_file, list[str]()

    def again(fs: SimFs, path: str, bytes_max: int) -> bytes:
        raw = read(fs, path, bytes_max)
        paths.append(path)
        if len(paths) == 2:  # after the manifest that is compared later, before the one that counts
            saved(fs, 2)
            raise CorruptionError("a record is not the one that was committed")
        return raw

    monkeypatch.setattr(SimFs, "read_file", again)
    assert loaded(fs) == (2, 2)
    assert len(paths) > 3


def test_ranks_that_opened_different_saves(fs: SimFs) -> None:
    reader = on(fs, StorageReader)
    reader.read_metadata()
    plan = reader.prepare_local_plan(LoadPlan([]))
    saved(fs, 2)
    reader.read_metadata()
    other = reader.prepare_local_plan(LoadPlan([]))
    assert reader.prepare_global_plan([plan, plan]) == [plan, plan]
    unknown = dataclasses.replace(other, storage_data=None)  # of a planner that dropped it
    assert reader.prepare_global_plan([plan, unknown]) == [plan, unknown]
    with pytest.raises(StorageError, match="ESTALE") as caught:
        reader.prepare_global_plan([plan, other])
    assert "different saves" in str(caught.value)


# -- where two names cannot be exchanged ----------------------------------------------------------


@pytest.fixture
def refusing(fs: SimFs) -> SimFs:
    fs.fail_next("exchange", errno.EINVAL, 1 << 30, 0)
    return fs


def test_a_checkpoint_is_replaced_by_renames(refusing: SimFs) -> None:
    saved(refusing, 2)
    assert refusing.fired["injected exchange"] == 1
    assert loaded(refusing) == (2, 2)
    assert [name for name, _ in refusing.listdir("/run")] == ["step-7"]


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("failures", [1, 2])
def test_an_error_leaves_the_old_one(refusing: SimFs, skip: int, failures: int) -> None:
    refusing.fail_next("rename", errno.EIO, failures, skip)
    with failing():
        saved(refusing, 2)
    assert loaded(refusing) == (1, 1)
    refusing.set_faults(1)
    refusing.fail_next("exchange", errno.EINVAL, 1 << 30, 0)
    saved(refusing, 3)
    assert loaded(refusing) == (3, 3)
    assert [name for name, _ in refusing.listdir("/run")] == ["step-7"]


def test_what_was_replaced_is_removed_by_the_next_save(refusing: SimFs) -> None:
    refusing.fail_next("rename", errno.EIO, 1, 2)  # E3
    saved(refusing, 2)
    assert ASIDE.removeprefix("/run/") in [name for name, _ in refusing.listdir("/run")]
    assert loaded(refusing) == (2, 2)
    saved(refusing, 3)
    assert loaded(refusing) == (3, 3)
    assert [name for name, _ in refusing.listdir("/run")] == ["step-7"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_load_between_the_two_renames(refusing: SimFs, is_late: bool) -> None:
    reader = on(refusing, Late)

    def move() -> None:
        refusing.rename(STEP, ASIDE)

    reader.act = move if is_late else lambda: None
    if not is_late:
        move()
    assert loaded(refusing, reader) == (1, 1)


def test_a_checkpoint_between_the_two_renames_is_one(tmp_path: Path) -> None:
    dcp.save(state(4), checkpoint_id=tmp_path / "c", storage_writer=StorageWriter())
    shutil.move(tmp_path / "c", tmp_path / "c.replaced")
    assert StorageReader.validate_checkpoint_id(tmp_path / "c")
    live = state(0)
    dcp.load(live, checkpoint_id=tmp_path / "c", storage_reader=StorageReader())
    assert live["n"] == 4
