"""Restoring what others wrote: plain models, fresh optimizers, safetensors, hostile metadata."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from statehold.errors import (
    CorruptionError,
    MissingFileError,
    StateholdError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
)
from statehold.integrations.dcp import restore_stock

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * seed)
    net(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net, _ = trained(seed)
    return net, torch.optim.AdamW(net.parameters(), lr=0.5)


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(other, one, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer_names", ["indices", "names"])
@pytest.mark.parametrize("make", [trained, fresh])
def test_stock_dcp(tmp_path: Path, optimizer_names: str, make: Any) -> None:
    net, optimizer = trained(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    by_name = optimizer_names == "names"
    saved = get_optimizer_state_dict(net, optimizer) if by_name else optimizer.state_dict()
    state = {"model": net.state_dict(), "optim": saved, "sched": scheduler.state_dict(), "step": 9}
    dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=dcp.FileSystemWriter(tmp_path))
    other, other_optimizer = make(2)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 5)
    live = {"model": other, "optim": other_optimizer, "sched": other_scheduler, "step": 0}
    report = restore_stock(tmp_path / "c", live)
    assert not report.missing
    assert live["step"] == 9
    assert other_scheduler.step_size == 3
    assert_equal(net.state_dict(), other.state_dict())
    assert_equal(optimizer.state_dict(), other_optimizer.state_dict())


def test_report_and_strictness(tmp_path: Path) -> None:
    net, _ = trained(1)
    dcp.save({"model": net.state_dict(), "extra": 3}, storage_writer=dcp.FileSystemWriter(tmp_path))
    other, _ = trained(2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    live = {"model": other, "more": torch.zeros(2)}
    with pytest.raises(StateMismatchError, match="more"):
        restore_stock(tmp_path, live)
    assert_equal(before, other.state_dict())
    report = restore_stock(tmp_path, live, strict=False)
    assert report.missing == ("more",)
    assert report.unexpected == ("extra",)
    assert_equal(net.state_dict(), other.state_dict())


def test_another_shape_changes_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "m.safetensors")
    live = {"a": torch.zeros(3), "b": torch.zeros(4)}
    with pytest.raises(StateMismatchError, match=r"expected shape \[4\], got \[3\]"):
        restore_stock(tmp_path, live, strict=False)
    assert not live["a"].any()


def test_one_file_renamed(tmp_path: Path) -> None:
    net, _ = trained(1)
    named = {f"transformer.{name}": value for name, value in net.state_dict().items()}
    save_file(named, tmp_path / "m.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "n.safetensors")
    other, _ = trained(2)
    report = restore_stock(
        tmp_path / "m.safetensors",
        {"model": other},
        rename=lambda name: name.removeprefix("transformer."),
    )
    assert not report.unexpected
    assert_equal(net.state_dict(), other.state_dict())


def sharded(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_hugging_face_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.zeros(9)}, tmp_path / "stale.safetensors")
    live = {"a": torch.zeros(3), "b": torch.zeros(3)}
    report = restore_stock(tmp_path, live)
    assert report.loaded == ("a", "b")
    assert live["a"].all()


def test_a_shard_is_missing(tmp_path: Path) -> None:
    sharded(tmp_path)
    os.unlink(tmp_path / "model-2.safetensors")
    with pytest.raises(MissingFileError):
        restore_stock(tmp_path, {"a": torch.zeros(3)})


def test_a_name_of_the_index_is_missing(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"c": torch.ones(3)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CorruptionError):
        restore_stock(tmp_path, {"a": torch.zeros(3)})


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HARM"],)


def test_metadata_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UnsupportedValueError, match="mkdir"):
        restore_stock(tmp_path, {"a": torch.zeros(3)})
    assert not (tmp_path / "harm").exists()


def test_values_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    dcp.save({"a": Harmful()}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    with pytest.raises(UnsupportedValueError):
        restore_stock(tmp_path / "c", {"a": 1})
    assert not (tmp_path / "harm").exists()


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        restore_stock(tmp_path, {})
    (tmp_path / ".metadata").write_bytes(b"\x80\x04N.")
    with pytest.raises(StateholdError):
        restore_stock(tmp_path, {})
