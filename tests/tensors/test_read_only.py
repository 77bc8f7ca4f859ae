"""Memory that may not be written is refused by name, before anything changes."""

from __future__ import annotations

import ctypes
import mmap
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import statehold
from statehold.dcp import StorageReader, StorageWriter
from statehold.errors import StateMismatchError
from statehold.process.host_memory import ReadOnly
from support.faults import DEADLINE_S, SMALL


def read_only(path: Path) -> torch.Tensor:
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.float32)


def test_restore_and_subscribe_refuse_it(tmp_path: Path) -> None:
    whole = read_only(tmp_path / "table")
    state = {"first": torch.ones(3), "table": whole[5:1000:3]}
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        state["first"].zero_()
        with pytest.raises(StateMismatchError, match="table"):
            ckpt.restore(state)
        assert not state["first"].any()
        ckpt.restore(state, skip=["table"])
        assert state["first"].all()
    with (
        pytest.raises(StateMismatchError, match="table"),
        statehold.subscribe(run, state) as updates,
    ):
        updates.wait(DEADLINE_S).apply()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_of_dcp_refuses_it(tmp_path: Path) -> None:
    state, step = {"table": read_only(tmp_path / "table")}, tmp_path / "step-000000000001"
    dcp.save(state, checkpoint_id=step, storage_writer=StorageWriter(), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="may not be written"):
        dcp.load(state, checkpoint_id=step, storage_reader=StorageReader(), no_dist=True)


def test_memory_that_has_become_writable_since_is_none() -> None:
    """As an allocator does with memory that it has reserved."""
    memory = mmap.mmap(-1, 1 << 16)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    address, protect = ctypes.addressof(view), ctypes.CDLL(None).mprotect
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(len(memory))
    assert protect(*arguments, mmap.PROT_READ) == 0
    read_only = ReadOnly()
    assert read_only.holds(address + 100, 8)
    assert protect(*arguments, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert not read_only.holds(address + 100, 8)
