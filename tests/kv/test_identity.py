"""identity(): the same content has the same one, and everything that changes pages another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import statehold
from statehold.errors import StateholdError, StorageError, UsageError
from statehold.kv import identity
from support.ranks import Ranks


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    config = {"rope_theta": 10000.0, "_name_or_path": "here", "transformers_version": "5"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_same_content_elsewhere_is_the_same(weights: Path, tmp_path: Path) -> None:
    shutil.copytree(weights, tmp_path / "copy")
    config(tmp_path / "copy", _name_or_path="there", transformers_version="6")
    assert identity(weights) == identity(tmp_path / "copy")
    assert len(identity(weights)) == 16


def test_other_weights_are_another(weights: Path) -> None:
    before = identity(weights)
    raw = bytearray((weights / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (weights / "model.safetensors").write_bytes(raw)
    assert identity(weights) != before


def test_another_configuration_or_layout_is_another(weights: Path) -> None:
    found = {identity(weights), identity(weights, dtype="bf16"), identity(weights, dtype="fp16")}
    config(weights, rope_theta=20000.0)
    assert len({*found, identity(weights), identity(weights, {"rope_theta": 1})}) == 5


def test_a_step_is_known_by_its_manifest(weights: Path, tmp_path: Path) -> None:
    for run, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        with statehold.Checkpointer(tmp_path / run) as ckpt:
            ckpt.save(5, {"weight": value, "blob": b"x" * int(value)})
    first = identity(tmp_path / "a")
    assert first == identity(f"{tmp_path / 'a'}@5") == identity(tmp_path / "a" / f"step-{5:012d}")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert first == identity(tmp_path / "b") == identity(tmp_path / "copy")
    assert first != identity(tmp_path / "c")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(1000))
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    return folder


def test_an_adapter_counts_by_its_content(weights: Path, adapter: Path, tmp_path: Path) -> None:
    def adapted(adapter: Path) -> bytes:
        return identity(weights, adapter=identity(adapter).hex())

    first = adapted(adapter)
    assert first != identity(weights)
    assert first == adapted(shutil.copytree(adapter, tmp_path / "under another name"))
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32}))
    scaled = adapted(adapter)
    (adapter / "config.json").write_text("{}")  # some trainers leave the one of the model, too
    assert adapted(adapter) == scaled
    (adapter / "adapter_model.safetensors").write_bytes(bytes(999) + b"1")
    assert len({first, scaled, adapted(adapter)}) == 3


def test_a_value_that_is_no_json_is_refused(weights: Path) -> None:
    with pytest.raises(UsageError, match="no JSON"):
        identity(weights, dtype=object())


class Scaled(torch.nn.Linear):
    """A module that keeps a factor beside its tensors."""

    scale = 1.0

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale = state


def test_the_values_of_a_step_count(tmp_path: Path) -> None:
    module, found = Scaled(4, 4), set()
    for scale in (1.0, 2.0):
        module.scale = scale
        with statehold.Checkpointer(tmp_path / str(scale)) as ckpt:
            ckpt.save(1, {"model": module})
        found.add(identity(tmp_path / str(scale)))
    assert len(found) == 2


def test_the_parts_of_all_ranks_count(tmp_path: Path) -> None:
    """Two steps differ in what rank 1 alone has saved."""
    found = set()
    for value in (1.0, 2.0):
        with Ranks(None, 2, run=str(tmp_path / str(value))) as ranks:
            ranks.save(1, lambda rank, value=value: {"own": torch.full((4,), rank * value)})
        found.add(identity(tmp_path / str(value)))
    assert len(found) == 2


@pytest.mark.parametrize("raw", [b'{"a": 1', b"[1]", b"\xff\xfe\xff"])
def test_a_configuration_that_is_none_is_refused(weights: Path, raw: bytes) -> None:
    (weights / "config.json").write_bytes(raw)
    with pytest.raises(UsageError, match=r"JSON") as caught:
        identity(weights)
    assert "config.json" in str(caught.value)


def test_weights_that_are_none_are_refused(weights: Path) -> None:
    file = weights / "model.safetensors"
    with pytest.raises(StateholdError):
        identity(file)
    file.write_bytes(b"")
    with pytest.raises(UsageError, match="empty"):
        identity(weights)
    file.unlink()
    file.symlink_to("/nothing")  # as in a hub's cache that was pruned
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        identity(weights)
