"""Every key that save() takes comes back: of plain dicts, of objects, and beside what is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn

import statehold
from statehold.dcp import StorageReader
from statehold.errors import InvariantError
from statehold.format.selection import Selection
from statehold.tensors import nodes
from support.faults import DEADLINE_S, SMALL
from support.matching import MemoryStep

KEYS: list[Any] = [
    np.int64(3),
    np.float32(1.5),
    np.datetime64("2026-01-01"),
    torch.float32,
    torch.Size([2]),
    torch.device("cpu"),
    (np.int64(3), "a"),
    frozenset({np.int64(3)}),
    (1, b"x", 2**70),
]
of_keys = pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)


class Counts:
    """An object whose state dict has such a key."""

    def __init__(self, key: Any, value: float) -> None:
        self.state: Any = {key: torch.full((3,), value), "plain": {key: value}}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def state(key: Any, value: float) -> dict[str, Any]:
    return {"w": torch.full((2,), value), "plain": {key: value}, "of": Counts(key, value)}


def a_run(path: Path, key: Any) -> Path:
    with statehold.Checkpointer(path / "run", **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(key, float(step))).wait("committed", DEADLINE_S)
    return path / "run"


@of_keys
def test_the_newest_step_comes_back(tmp_path: Path, key: Any) -> None:
    live = state(key, 0.0)
    with statehold.Checkpointer(a_run(tmp_path, key), **SMALL) as ckpt:
        assert ckpt.restore(live) == 2
    assert live["plain"] == {key: 2.0}
    assert [type(each) for each in live["plain"]] == [type(key)]
    assert live["of"].state[key].tolist() == [2.0] * 3
    assert live["of"].state["plain"] == {key: 2.0}


@of_keys
def test_what_is_wanted_beside_it_comes_back(tmp_path: Path, key: Any) -> None:
    run = a_run(tmp_path, key)
    live = {"w": torch.zeros(2)}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        assert ckpt.restore(live, only=["w"]) == 2
    assert live["w"].tolist() == [2.0, 2.0]
    with statehold.subscribe(run, {"w": torch.zeros(2)}) as subscription:
        update = subscription.wait(DEADLINE_S)
        assert update is not None
        assert update.step == 2


@of_keys
def test_readers_without_a_state_take_it(tmp_path: Path, key: Any) -> None:
    run = a_run(tmp_path, key)
    assert statehold.load(run, "plain") == {key: 2.0}
    assert statehold.load(run, f"of.plain.{key}") == 2.0
    step = statehold.open(run)[2]
    assert step.values["plain"] == {key: 2.0}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_has_the_name_that_torch_gives_it(tmp_path: Path) -> None:
    wanted = {"counts": {"3": torch.zeros(2)}}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"counts": {np.int64(3): torch.ones(2)}}).wait("committed", DEADLINE_S)
    reader = StorageReader(tmp_path / "run" / "step-000000000001")
    torch_dcp.load(wanted, storage_reader=reader)
    assert wanted["counts"]["3"].tolist() == [1.0, 1.0]


def test_a_renamed_part_keeps_such_keys() -> None:
    step = MemoryStep({"a": {np.int64(3): torch.ones(2), "moved": torch.ones(1)}})
    live = {"a": {np.int64(3): torch.zeros(2)}, "b": torch.zeros(1)}
    step.restore(live, selection=Selection(rename={"a.moved": "b"}))
    assert live["a"][np.int64(3)].tolist() == [1.0, 1.0]
    assert live["b"].tolist() == [1.0]


@pytest.mark.parametrize("where", ["key", "value"])
def test_no_step_is_committed_with_a_value_that_restore_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    node = nodes.torch_node

    def lies(value: Any) -> Any:
        return {"$torch": {"dtype": "nonsense"}} if value is torch.float32 else node(value)

    monkeypatch.setattr(nodes, "torch_node", lies)
    part = {torch.float32: 1} if where == "key" else {"x": torch.float32}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        with pytest.raises(InvariantError, match="no reader would accept"):
            ckpt.save(1, {"part": part, "m": nn.Linear(1, 1)}).wait("committed", DEADLINE_S)
        assert ckpt.steps() == []
