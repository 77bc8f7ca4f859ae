"""Commands on what each writer leaves: a Checkpointer, alone and on several ranks, and dcp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import statehold
from statehold import _core
from statehold.integrations.dcp import StorageWriter
from support.faults import SMALL
from support.rank_states import state
from support.ranks import Ranks

Ask = Callable[..., tuple[int, Any]]


def test_a_checkpointer(tmp_path: Path, ask: Ask) -> None:
    model = torch.nn.Linear(40, 30).to(torch.bfloat16)
    with statehold.Checkpointer(tmp_path, **SMALL) as ckpt:
        ckpt.save(5, {"model": model, "lr": 0.1}).wait("committed")
    assert ask("verify", tmp_path)[0] == 0
    _, document = ask("show", tmp_path, "model.weight")
    values = model.weight.detach().double()
    assert document["statistics"]["mean"] == pytest.approx(values.mean().item())
    assert document["statistics"]["max"] == values.max().item()


def test_several_ranks(tmp_path: Path, ask: Ask) -> None:
    run = str(tmp_path / "run")
    with Ranks(_core.open_fs("threads"), 3, run=run) as ranks:
        ranks.save(1, lambda rank: state(rank, 1))
        ranks.save(2, lambda rank: state(rank, 2))
    code, document = ask("verify", run, "--all")
    assert code == 0, document
    assert [step["world_size"] for step in document["steps"]] == [3, 3]
    assert ask("show", run, "w")[1]["statistics"]["min"] == 2
    assert ask("show", run, "own", "--rank", 2)[1]["statistics"]["max"] == 202
    code, document = ask("diff", f"{run}@1", "@2", "--rank", 1)
    assert code == 1
    assert {each["name"]: each["max_abs"] for each in document["tensors"]} == {"w": 1, "own": 100}


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_dcp(tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "checkpoint-30"
    tensors = {"w": torch.arange(1000), "half": torch.ones(7, dtype=torch.float8_e5m2)}
    dcp.save({**tensors, "n": 3}, checkpoint_id=path, storage_writer=StorageWriter(), no_dist=True)
    assert ask("verify", path)[0] == 0
    _, document = ask("show", path)
    assert {tensor["name"] for tensor in document["tensors"]} == {"w", "half"}
    assert ask("show", path, "half")[1]["statistics"]["mean"] == 1
    assert ask("diff", path, path)[0] == 0
