"""Steps of version 4, written once and for all, restore value by value on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

import statehold
from statehold import _core
from statehold.cli import main
from statehold.errors import FormatVersionError
from statehold.format import manifest, record
from statehold.integrations.dcp import StorageReader
from support.faults import SMALL
from support.ranks import Ranks

GOLDEN = Path(__file__).parent / "v4"
ALONE, TOGETHER = 11, 12


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_a_step_of_one_rank(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"weight": torch.zeros(4, 3), "bias": torch.zeros(5)}}
    with statehold.Checkpointer(GOLDEN, **SMALL) as ckpt:
        assert ckpt.restore(state, step=ALONE) == ALONE
    assert torch.equal(state["model"]["weight"], numbered(4, 3))
    assert torch.equal(state["model"]["bias"], numbered(5))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("step", [ALONE, TOGETHER])
def test_every_number_of_ranks_restores_them(step: int, size: int) -> None:
    wanted = {"rows": numbered(7, 2)}
    if step == ALONE:
        wanted = {"weight": numbered(4, 3), "bias": numbered(5)}
    fs = _core.open_fs("threads")
    with Ranks(fs, size, str(GOLDEN)) as ranks:
        states = [
            {"model": {name: torch.zeros(each.shape) for name, each in wanted.items()}}
            for _ in range(size)
        ]
        ranks.each(lambda rank: ranks.ckpts[rank].restore(states[rank], step=step))
    fs.close()
    for state in states:
        for name, tensor in wanted.items():
            assert torch.equal(state["model"][name], tensor)


@pytest.mark.parametrize("step", [ALONE, TOGETHER])
def test_the_commands_see_an_ordinary_step(
    step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"step-{step:012d}"
    shutil.copytree(GOLDEN / name, tmp_path / name)
    assert main(["verify", str(tmp_path / name)]) == 0
    tensor = "model.weight" if step == ALONE else "model.rows"
    capsys.readouterr()
    assert main(["show", "--json", str(tmp_path / name), tensor]) == 0
    shown = json.loads(capsys.readouterr().out)
    numel = 12 if step == ALONE else 14
    assert shown["statistics"]["max"] == numel - 1
    assert len(shown["chunks"]) == (4 if step == ALONE else 3)
    assert main(["diff", str(GOLDEN / name), str(tmp_path / name)]) == 0


@pytest.mark.parametrize(("step", "module"), [(ALONE, manifest), (TOGETHER, record)])
def test_an_older_reader_says_that_it_is_newer(
    step: int, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERSION", 3)
    with statehold.Checkpointer(GOLDEN, **SMALL) as ckpt, pytest.raises(FormatVersionError):
        ckpt.restore({}, step=step)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["drop-in", "stock"])
@pytest.mark.parametrize("step", [ALONE, TOGETHER])
def test_torch_loads_them(step: int, kind: str) -> None:
    wanted = {"model.rows": numbered(7, 2)}
    if step == ALONE:
        wanted = {"model.weight": numbered(4, 3), "model.bias": numbered(5)}
    path = str(GOLDEN / f"step-{step:012d}")
    if kind == "stock":
        found: Any = {name: torch.zeros(each.shape) for name, each in wanted.items()}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(path))
    else:
        names = {name.removeprefix("model."): each.shape for name, each in wanted.items()}
        model = {name: torch.zeros(shape) for name, shape in names.items()}
        dcp.load({"model": model}, checkpoint_id=path, storage_reader=StorageReader())
        found = {f"model.{name}": each for name, each in model.items()}
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)
