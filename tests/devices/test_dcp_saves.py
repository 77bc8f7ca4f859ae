"""dcp.save of device tensors: the drop-in copies like a Checkpointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.cuda import _pin_memory_utils as pin_memory_utils

from statehold.integrations.dcp import StorageReader, StorageWriter
from support.cuda import Machine
from support.dcp_checks import HalvingPlanner
from support.faults import SMALL

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_write_of_several_files_pins_its_buffers_once(tmp_path: Path, machine: Machine) -> None:
    """Two chunks of a name go to two files."""
    values = torch.arange(64.0).reshape(8, 8)
    state = {"rows": machine.put(values), "columns": machine.put(values).t()}
    writer = StorageWriter(tmp_path / "step", **SMALL)
    dcp.save(state, storage_writer=writer, planner=HalvingPlanner())
    assert len(list((tmp_path / "step").glob("*.safetensors"))) == 2
    assert [kind for kind, _ in machine.pins.calls] == ["pin", "unpin"]
    with machine.still():
        loaded = {name: torch.zeros(8, 8) for name in state}
        dcp.load(loaded, storage_reader=StorageReader(tmp_path / "step"))
        assert torch.equal(loaded["rows"], values)
        assert torch.equal(loaded["columns"], values.t())


def test_async_save_returns_when_copies_from_every_device_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself waits only for the device that is current, which may be another."""
    copy, late = torch.UntypedStorage.copy_, []

    def copy_from_device(to: Any, source: Any, non_blocking: bool = False) -> Any:
        if non_blocking:
            late.append(lambda: copy(to, source))
            return to
        return copy(to, source)

    with monkeypatch.context() as patch:
        for module in (torch.cuda, torch.accelerator):
            patch.setattr(module, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        for name in ("pin_memory", "unpin_memory"):
            patch.setattr(pin_memory_utils, name, lambda *_: None)
        patch.setattr(torch.UntypedStorage, "copy_", copy_from_device)
        values = torch.arange(64.0)
        staged = StorageWriter(tmp_path / "step").stage({"weight": values})
        assert torch.equal(staged["weight"], values)
        assert staged["weight"].data_ptr() != values.data_ptr()
        assert not late


def test_a_copy_of_host_tensors_touches_no_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for devices loads the driver, and a child that is forked then cannot use it."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append(True)))
    values = torch.arange(64.0)
    staged = StorageWriter(tmp_path / "step").stage({"weight": values})
    assert torch.equal(staged["weight"], values)
    assert not asked
