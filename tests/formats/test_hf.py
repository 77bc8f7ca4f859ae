"""Safetensors as Hugging Face writes them, out and in, bit for bit, also in shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import statehold
from statehold.cli import main
from statehold.errors import (
    ChecksumError,
    CorruptionError,
    HeaderError,
    UnsupportedValueError,
    UsageError,
)
from statehold.integrations.formats import hf
from support.transfers import check_equal, saved, tensors

safetensors = pytest.importorskip("safetensors")


@pytest.mark.parametrize("shard_bytes", [hf.SHARD_BYTES, 200])
def test_every_dtype_goes_out_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", shard_bytes)
    state = tensors()
    step = saved(tmp_path / "run", 3, {"model": state, "epoch": 2})
    assert statehold.export_step(step, tmp_path / "hf", "hf") == ()
    assert (tmp_path / "hf" / hf.INDEX).exists() == (shard_bytes == 200)
    statehold.import_step(tmp_path / "hf", f"{tmp_path / 'new'}@9")
    found = statehold.load(tmp_path / "new", "model")
    check_equal({name: found[name] for name in state}, state)
    assert found.keys() == state.keys()
    assert found["tied.first"] is found["tied.again"]


def test_stock_readers_open_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = tensors()
    step = saved(tmp_path / "run", 3, {"model": state})
    statehold.export_step(step, tmp_path / "hf", "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert state.keys() - found.keys() == {"tied.again"}
    check_equal({name: found[name] for name in state if name in found},
                {name: state[name] for name in state if name in found})  # fmt: skip


def test_a_config_goes_with_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    (model / "checkpoint-3.json").mkdir(parents=True)
    texts = {"config.json": "{}", "tokenizer.json": "[]", "merges.txt": "a b"}
    for name, text in {**texts, hf.INDEX: "{}", "old.safetensors": "x"}.items():
        (model / name).write_text(text)
    step = saved(tmp_path / "run", 3, {"model": tensors()})
    statehold.export_step(step, tmp_path / "a", "hf", config=model)
    found = {path.name: path.read_text() for path in (tmp_path / "a").glob("*[!s]")}
    assert found == texts
    statehold.export_step(step, tmp_path / "b", "hf", config=model / "config.json")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"no config\.json"):
        statehold.export_step(step, tmp_path / "c", "hf", config=tmp_path / "a" / "merges.txt")
    with pytest.raises(UsageError, match=r"no config\.json"):
        statehold.export_step(step, tmp_path / "c", "hf", config=tmp_path / "none/config.json")
    with pytest.raises(UsageError, match="format hf only"):
        statehold.export_step(step, tmp_path / "c", "torch", config=model)
    assert not (tmp_path / "c").exists()
    assert main(["export", str(step), str(tmp_path / "d"), "--to", "hf"]) == 0
    assert "--config DIR copies one" in capsys.readouterr().err


def test_what_stock_writers_write_comes_in(tmp_path: Path) -> None:
    from safetensors.torch import save_file, save_model

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "one.safetensors"))
    statehold.import_step(tmp_path / "one.safetensors", f"{tmp_path / 'run'}@1")
    found = statehold.load(tmp_path / "run", "model")
    assert found["0.weight"] is found["1.weight"]
    model.load_state_dict(found)
    save_file(
        {"x": torch.ones(3, dtype=torch.uint8), "y": torch.ones(2)}, tmp_path / "b.safetensors"
    )
    statehold.import_step(tmp_path / "b.safetensors", f"{tmp_path / 'run'}@2", name="")
    assert statehold.load(tmp_path / "run", "y").tolist() == [1, 1]


def test_what_it_cannot_hold_is_named(tmp_path: Path) -> None:
    wide = {"model": {"wide": torch.ones(2, dtype=torch.complex128)}}
    step = saved(tmp_path / "run", 1, wide)
    with pytest.raises(UnsupportedValueError, match=r"(?s)wide.*complex128"):
        statehold.export_step(step, tmp_path / "hf", "hf")
    step = saved(tmp_path / "run", 2, {"model": {"w": torch.ones(2), "count": 3}, "lr": 0.1})
    with pytest.warns(RuntimeWarning, match="count"):
        assert statehold.export_step(step, tmp_path / "hf", "hf") == ("count",)
    with pytest.warns(RuntimeWarning, match=r"model\.count, lr"):
        statehold.export_step(step, tmp_path / "all", "hf", name="")


def test_damage_is_refused_on_both_sides(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(1000)}}
    step = saved(tmp_path / "run", 1, state)
    statehold.export_step(step, tmp_path / "hf", "hf")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(HeaderError):
        statehold.import_step(tmp_path / "hf", f"{tmp_path / 'new'}@1")
    data = tmp_path / "run" / "step-000000000001" / "rank-00000-of-00001.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    with pytest.raises(ChecksumError, match=r"model\.w"):
        statehold.export_step(step, tmp_path / "again", "hf")
    assert not (tmp_path / "again").exists()


def test_a_shard_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 10)
    step = saved(tmp_path / "run", 1, {"model": {"a": torch.ones(9), "b": torch.ones(9)}})
    statehold.export_step(step, tmp_path / "hf", "hf")
    index = json.loads((tmp_path / "hf" / hf.INDEX).read_text())
    file = index["weight_map"]["b"]
    (tmp_path / "hf" / file).unlink()
    with pytest.raises(CorruptionError, match=file):
        statehold.import_step(tmp_path / "hf", f"{tmp_path / 'new'}@1")


def test_what_is_in_the_way_is_refused(tmp_path: Path) -> None:
    step = saved(tmp_path / "run", 1, {"model": {"a": torch.ones(9)}})
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="destination of an export exists"):
        statehold.export_step(step, tmp_path / "there", "hf")
    with pytest.raises(UsageError, match="no such format"):
        statehold.export_step(step, tmp_path / "hf", "onnx")
    statehold.export_step(step, tmp_path / "hf", "hf")
    with pytest.raises(UsageError, match="has this step already"):
        statehold.import_step(tmp_path / "hf", step)
    with pytest.raises(UsageError, match="a run and a number"):
        statehold.import_step(tmp_path / "hf", f"{tmp_path / 'run'}@newest")
    with pytest.raises(UsageError, match="not a checkpoint of another library"):
        statehold.import_step(tmp_path / "there", f"{tmp_path / 'run'}@5")
    with pytest.raises(UsageError, match="needs no import"):
        statehold.import_step(tmp_path / "run" / "step-000000000001", f"{tmp_path / 'run'}@5")


def test_metadata_that_nest_without_end_are_refused(tmp_path: Path) -> None:
    """The recursion of the parser ended the import with a traceback."""
    path = tmp_path / "model.safetensors"
    metadata = {"statehold.step": "1", "DCP_SHARDING_INFO": "saved_offsets"}
    metadata["statehold.global_shapes"] = "[" * 100_000
    safetensors_torch = pytest.importorskip("safetensors.torch")
    safetensors_torch.save_file({"w": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(HeaderError, match="metadata"):
        statehold.import_step(path, f"{tmp_path / 'new'}@1")


def test_the_word_format_is_no_name_of_a_tie(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    weight = torch.ones(2)
    safetensors_torch.save_file({"pt": weight}, tmp_path / "in.safetensors", {"format": "pt"})
    statehold.import_step(tmp_path / "in.safetensors", f"{tmp_path / 'in'}@1")
    assert set(statehold.load(tmp_path / "in", "model")) == {"pt"}
    step = saved(tmp_path / "run", 1, {"model": {"w": weight, "format": weight}})
    statehold.export_step(step, tmp_path / "out", "hf")
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "w": "format"}


@pytest.mark.parametrize("below", ["", "run"])
def test_a_run_among_the_files_of_its_source_is_refused_at_once(tmp_path: Path, below: str) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    safetensors_torch.save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="among the files of the source"):
        statehold.import_step(tmp_path, f"{tmp_path / below}@1")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_without_an_index_the_usual_name_means_the_model(tmp_path: Path) -> None:
    """The other files hold it in another form, as those of Mistral do."""
    safetensors_torch = pytest.importorskip("safetensors.torch")
    for name, tensor in (("model", "w"), ("consolidated", "v")):
        safetensors_torch.save_file({tensor: torch.ones(4)}, tmp_path / f"{name}.safetensors")
    assert list(hf.read(str(tmp_path))) == ["w"]
