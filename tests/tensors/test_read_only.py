"""Memory that may not be written is refused by name, before anything changes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

import statehold
from statehold.errors import StateMismatchError
from support.faults import DEADLINE_S, SMALL


def read_only(path: Path) -> torch.Tensor:
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with pytest.warns(UserWarning, match="not writable"):
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
