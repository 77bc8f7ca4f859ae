"""Known defects of the stock writers and readers: each is shown, and shown not to be here.

A test that says "no longer" means that torch has fixed its side: turn that half into a skip.
(Defect 4, missing shards, needs several ranks: support/dcp_checks.py.)
"""

from __future__ import annotations

import errno
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.filesystem import FileSystem

from statehold import Io
from statehold.errors import ChecksumError, NoSpaceError, UnsupportedValueError, UsageError
from statehold.integrations.dcp import StorageReader, StorageWriter
from support.dcp_checks import HalvingPlanner, failing
from support.endpoints import machine_of
from support.in_memory import SimFs

pytestmark = pytest.mark.filterwarnings("ignore")


def state(value: float) -> dict[str, Any]:
    return {f"w{i}": torch.full((40, 50), value + i) for i in range(4)}


# -- 1: an error in a helper thread is lost -----------------------------------------------------


def test_stock_loses_errors_of_helper_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, fired = FileSystem.create_stream, []

    def create_stream(self: FileSystem, path: Any, mode: str) -> Any:
        if threading.current_thread() is not threading.main_thread():
            fired.append(path)
            raise OSError(errno.ENOSPC, "injected")
        return inner(self, path, mode)

    # The main thread takes nothing until a helper has failed: that is what loses its file.
    start = threading.Thread.start

    def start_and_wait(self: threading.Thread) -> None:
        start(self)
        self.join()

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2))
    assert fired
    monkeypatch.undo()
    with failing():  # success was reported: "no longer" if this does not fail
        dcp.load(state(0), storage_reader=dcp.FileSystemReader(tmp_path))


STEPS_OF_A_SAVE = ["mkdir", "open_write", "write", "sync", "write_file", "sync_dir", "exchange"]


@pytest.mark.parametrize("operation", STEPS_OF_A_SAVE)
def test_every_storage_error_is_raised(operation: str) -> None:
    fs = SimFs(1)
    fs.mkdir("/run")
    writer = on(fs, "/run/step-1")
    dcp.save(state(1), storage_writer=writer)
    fs.fail_next(operation, errno.ENOSPC)
    with failing() as caught:
        dcp.save(state(2), storage_writer=writer)
    assert fs.fired["injected"] == 1
    assert isinstance(caught[1], NoSpaceError)
    assert isinstance(caught[1], Exception)  # 5: what torch wraps it in is none
    loaded = state(0)
    dcp.load(loaded, storage_reader=on(fs, "/run/step-1", StorageReader))
    assert torch.equal(loaded["w0"], state(1)["w0"]), "the older checkpoint is untouched"
    # The next save is to another directory, and would find no room.
    assert [name for name, _ in fs.listdir("/run")] == ["step-1"]


def test_what_was_replaced_stays_until_its_successor_is_durable() -> None:
    fs = SimFs(1)
    fs.mkdir("/run")
    writer = on(fs, "/run/step-1")
    dcp.save(state(1), storage_writer=writer)
    fs.record()
    dcp.save(state(2), storage_writer=writer)
    syncs = [each for each in fs.recorded if each.startswith("sync_dir")]
    fs.fail_next("sync_dir", errno.EIO, 1, len(syncs) - 1)  # D7
    with failing():
        dcp.save(state(3), storage_writer=writer)
    assert len(fs.listdir("/run")) == 2
    loaded = state(0)
    dcp.load(loaded, storage_reader=on(fs, "/run/step-1", StorageReader))
    assert torch.equal(loaded["w0"], state(3)["w0"])


def on(fs: SimFs, path: str, kind: Any = StorageWriter) -> Any:
    found = kind(path, io=Io(backend="threads"))
    machine_of(found).borrowed_fs = fs
    return found


# -- 2: values make safetensors files unreadable ------------------------------------------------


def test_values_in_safetensors(tmp_path: Path) -> None:
    mixed = {"w": torch.ones(3), "step": 5}
    stock = dcp.HuggingFaceStorageWriter(str(tmp_path / "stock"))
    dcp.save(mixed, storage_writer=stock)
    (file,) = (tmp_path / "stock").glob("*.safetensors")
    with pytest.raises(SafetensorError), safe_open(file, "pt"):
        pass
    dcp.save(mixed, storage_writer=StorageWriter(tmp_path / "ours"))
    (file,) = (tmp_path / "ours").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert torch.equal(opened.get_tensor("w"), torch.ones(3))
    loaded = {"w": torch.zeros(3), "step": 0}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "ours"))
    assert loaded["step"] == 5


# -- 3: of two chunks of a name on one rank, one is lost ----------------------------------------


def test_two_chunks_of_a_name(tmp_path: Path) -> None:
    stock = dcp.HuggingFaceStorageWriter(str(tmp_path / "stock"), save_distributed=True)
    dcp.save(state(1), storage_writer=stock, planner=HalvingPlanner())
    (file,) = (tmp_path / "stock").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("w0").shape == (20, 50), "the stock writer no longer loses chunks"
    dcp.save(state(1), storage_writer=StorageWriter(tmp_path / "ours"), planner=HalvingPlanner())
    for reader in (
        StorageReader(tmp_path / "ours"),
        dcp.HuggingFaceStorageReader(str(tmp_path / "ours")),
    ):
        loaded = state(0)
        dcp.load(loaded, storage_reader=reader)
        assert all(torch.equal(loaded[name], value) for name, value in state(1).items())


# -- what the format cannot hold, and what must not go ------------------------------------------


class Own:
    pass


def test_a_value_that_no_step_can_hold_is_named(tmp_path: Path) -> None:
    with failing() as caught:
        dcp.save({"a": {"b": Own()}}, storage_writer=StorageWriter(tmp_path / "step-1"))
    assert isinstance(caught[1], UnsupportedValueError)
    assert caught[1].facts["path"] == "a.b"
    assert not (tmp_path / "step-1").exists()


def test_a_refused_buffer_of_bytes_is_named_and_says_what_to_store(tmp_path: Path) -> None:
    with failing() as caught:
        dcp.save({"a": {"b": io.BytesIO(b"x")}}, storage_writer=StorageWriter(tmp_path / "step-1"))
    assert isinstance(caught[1], UnsupportedValueError)
    assert caught[1].facts == {"path": "a.b", "type": "_io.BytesIO"}
    assert caught[1].hint == "store value.getvalue()"


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with failing() as caught:
        dcp.load(state(0), storage_reader=StorageReader(tmp_path))
    assert isinstance(caught[1], ChecksumError)
    assert caught[1].facts["tensor"] == "w3"


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with failing() as caught:
        dcp.save(state(1), storage_writer=StorageWriter(tmp_path))
    assert isinstance(caught[1], UsageError)
    assert (tmp_path / "config.json").exists()


def test_overwrite_false(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c", overwrite=False)
    dcp.save(state(1), storage_writer=writer)
    with failing() as caught:
        dcp.save(state(2), storage_writer=writer)
    assert isinstance(caught[1], UsageError)


# -- what follows the commit ---------------------------------------------------------------------


def test_a_replaced_checkpoint_that_cannot_be_removed_fails_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fs = SimFs(1)
    fs.mkdir("/run")
    writer = on(fs, "/run/step-1")
    dcp.save(state(1), storage_writer=writer)
    fs.fail_next("unlink", errno.EIO)
    dcp.save(state(2), storage_writer=writer)
    assert fs.fired["injected"] == 1
    loaded = state(0)
    dcp.load(loaded, storage_reader=on(fs, "/run/step-1", StorageReader))
    assert torch.equal(loaded["w0"], state(2)["w0"])
    assert "the checkpoint at /run/step-1 is committed" in caplog.text
