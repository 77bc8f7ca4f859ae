"""Saves and loads of torch are seen like those of a Checkpointer, and take the profile."""

from __future__ import annotations

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from statehold.integrations.dcp import StorageReader, StorageWriter
from statehold.io.mounts import mount_of
from statehold.io.profile import Profile, path_for, save
from statehold.observe.counters import figures_of
from statehold.options.io import DEFAULTS, Io, Moving, settled
from statehold.units import MiB
from support.dcp_checks import failing
from support.endpoints import machine_of

pytestmark = pytest.mark.filterwarnings("ignore")

NUMEL = 1 << 18


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((NUMEL,), float(step)), "b": torch.ones(3), "step": step}


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [each for each in found if each["ph"] in ("X", "b")]


def figure(run: Path, name: str) -> float:
    (line,) = figures_of(str(run), 0).samples(name)
    return float(line.split()[-1])


def test_a_save_and_a_load_are_traced_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace.json"
    with caplog.at_level(logging.INFO, "statehold"):
        writer = StorageWriter(tmp_path / "step-7", trace=trace)
        dcp.save(state(7), storage_writer=writer)
        after_save = {each["name"] for each in events(trace)}
        loaded = state(0)
        dcp.load(loaded, storage_reader=StorageReader(tmp_path / "step-7", trace=trace))
    assert loaded["step"] == 7
    assert {"write", "commit", "copy", "transfer", "save"} == after_save
    names = [each["name"] for each in events(trace)]
    assert {*after_save, "restore", "read", "verify"} == set(names)
    (restore,) = [each for each in events(trace) if each["name"] == "restore"]
    assert restore["args"]["step"] == 7
    assert restore["args"]["read_bytes"] >= NUMEL * 4
    assert figure(tmp_path, "saves_committed_total") == figure(tmp_path, "restores_total") == 1
    assert figure(tmp_path, "saves_in_flight") == 0
    assert figure(tmp_path, "newest_step") == figure(tmp_path, "restored_step") == 7
    assert figure(tmp_path, "written_bytes_total") > NUMEL * 4
    pickle.dumps(writer)


def test_a_save_that_fails_is_counted(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "step-1")
    with failing():
        dcp.save({"w": torch.ones(3), "o": object()}, storage_writer=writer)
    assert figure(tmp_path, "saves_failed_total") == 1
    assert figure(tmp_path, "saves_committed_total") == 0
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load({"w": torch.ones(3)}, storage_reader=StorageReader(tmp_path / "step-1"))
    dcp.save(state(2), checkpoint_id=tmp_path / "step-2", storage_writer=writer)
    file = next((tmp_path / "step-2").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(state(0), storage_reader=StorageReader(tmp_path / "step-2"))
    assert figure(tmp_path, "restores_failed_total") == 1


def test_they_take_the_profile_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    moving = Moving(buffer_bytes=2 * MiB, queue_depth=4, backend="threads", copy_threads=1)
    save(Profile(mount_of(str(tmp_path)), moving, "today"), path_for(str(tmp_path)))
    for endpoint in (StorageWriter(), StorageReader()):
        assert settled(machine_of(endpoint).at(str(tmp_path / "step-1")).options.io) == moving
    given = StorageWriter(io=Io(buffer_bytes="1MiB", profile=None))
    found = settled(machine_of(given).at(str(tmp_path / "step-1")).options.io)
    assert (found.buffer_bytes, found.backend) == (MiB, "auto")
    dcp.save(state(1), storage_writer=StorageWriter(tmp_path / "step-1"))
    os.unlink(path_for(str(tmp_path)))
    assert settled(machine_of(StorageReader()).at(str(tmp_path / "step-1")).options.io) == DEFAULTS
