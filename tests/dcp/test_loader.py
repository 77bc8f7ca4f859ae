"""A data loader and generators through torch.distributed.checkpoint, as docs/dcp.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import statehold
from statehold.integrations.dcp import StorageReader, StorageWriter
from support.loading import SAMPLES

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def fresh(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    loader = stateful.StatefulDataLoader(SAMPLES, batch_size=4, shuffle=True)
    return {"data": loader, "rng": statehold.Rng()}


def drawn(batches: Any) -> torch.Tensor:
    return torch.cat([next(batches), torch.rand(4, 8)])


def load(state: dict[str, Any], path: Path) -> None:
    dcp.load(state, checkpoint_id=path, storage_reader=StorageReader())


def test_the_generators_are_loaded_again_once_the_iterator_is_there(tmp_path: Path) -> None:
    state = fresh(1)
    batches = iter(state["data"])
    next(batches)
    dcp.save(state, checkpoint_id=tmp_path / "step-1", storage_writer=StorageWriter())
    expected = drawn(batches)

    state = fresh(2)
    load(state, tmp_path / "step-1")
    batches = iter(state["data"])
    load({"rng": state["rng"]}, tmp_path / "step-1")
    assert torch.equal(drawn(batches), expected)
