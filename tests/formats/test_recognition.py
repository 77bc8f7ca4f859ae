"""Every kind of source: an import and restore_stock take the same ones, and refuse them alike."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model

import statehold
from statehold.dcp import restore_stock
from statehold.errors import StateholdError
from statehold.integrations.formats.recognition import FORMATS, recognised
from support import zero_files
from support.transfers import bits, saved, tensors
from support.zero_files import classes

__all__ = ["classes"]
pytestmark = [
    pytest.mark.usefixtures("classes"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

STATE = {"a": {"w": torch.arange(12.0).view(3, 4)}, "list": [torch.ones(2), {"c": torch.ones(1)}]}
FLAT = {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}


def torch_file(path: Path, **options: Any) -> Path:
    torch.save({**STATE, "n": 3, "pair": (2, 1)}, path / "c.pt", **options)
    return path / "c.pt"


def a_file_of_safetensors(path: Path) -> Path:
    save_file(FLAT, path / "m.safetensors")
    return path / "m.safetensors"


def shards(path: Path, save: Callable[[Any, Path], None], index: str, suffix: str) -> Path:
    for number, name in enumerate(FLAT):
        save({name: FLAT[name]}, path / f"part-{number}.{suffix}")
    places = {name: f"part-{number}.{suffix}" for number, name in enumerate(FLAT)}
    (path / index).write_text(json.dumps({"weight_map": places}))
    return path


def shards_of_safetensors(path: Path) -> Path:
    return shards(path, save_file, "model.safetensors.index.json", "safetensors")


def shards_beside_a_stranger(path: Path) -> Path:
    """Files that an index does not name are no part of the checkpoint."""
    save_file({"w": torch.zeros(9)}, path / "consolidated.safetensors")
    torch.save(FLAT, path / "pytorch_model.bin")
    return shards_of_safetensors(path)


def without_a_shard(path: Path) -> Path:
    os.unlink(shards_of_safetensors(path) / "part-1.safetensors")
    return path


def without_any_shard(path: Path) -> Path:
    os.unlink(without_a_shard(path) / "part-0.safetensors")
    return path


def parts_of_ranks(path: Path) -> Path:
    """As ranks write them with HuggingFaceStorageWriter."""
    for rank, part in enumerate(STATE["a"]["w"].chunk(3)):  # type: ignore[call-overload]
        told = json.dumps({"w": {"saved_offsets": [rank, 0]}})
        save_file({"w": part}, path / f"{rank}.safetensors", metadata={"DCP_SHARDING_INFO": told})
    return path


def without_a_part(path: Path) -> Path:
    os.unlink(parts_of_ranks(path) / "1.safetensors")
    return path


def tied(path: Path) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save_model(model, str(path / "m.safetensors"))
    return path


def whole_bin(path: Path) -> Path:
    torch.save(FLAT, path / "pytorch_model.bin")
    return path


def shards_of_bin(path: Path) -> Path:
    return shards(path, torch.save, "pytorch_model.bin.index.json", "bin")


def folder(path: Path) -> Path:
    dcp.save({**STATE, "n": 3}, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def every_dtype(path: Path) -> Path:
    dcp.save(tensors(torch.complex128), checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def a_folder_without_data(path: Path) -> Path:
    os.unlink(folder(path) / "__0_0.distcp")
    return path / "dcp"


def a_flip(path: Path) -> Path:
    raw = bytearray(torch_file(path).read_bytes())
    raw[raw.index(STATE["a"]["w"].numpy().tobytes()) + 5] ^= 1  # type: ignore[call-overload]
    (path / "c.pt").write_bytes(raw)
    return path / "c.pt"


def a_cut_file(path: Path) -> Path:
    (path / "c.pt").write_bytes(torch_file(path).read_bytes()[:-100])
    return path / "c.pt"


def universal(path: Path) -> Path:
    source = zero_files.write(path / "zero", 2, 2)
    step = statehold.import_step(source, f"{path / 'between'}@3")
    statehold.export_step(step, path / "universal", "deepspeed-universal")
    return path / "universal"


def a_step(path: Path) -> Path:
    saved(path / "ours", 1, STATE)
    return path / "ours" / "step-000000000001"


def an_archive(path: Path) -> Path:
    with zipfile.ZipFile(path / "x.zip", "w") as archive:
        archive.writestr("readme", "no tensors")
    return path / "x.zip"


def a_module(path: Path) -> Path:
    torch.save(torch.nn.Linear(2, 2), path / "c.pt")
    return path / "c.pt"


def a_tensor(path: Path) -> Path:
    torch.save(torch.ones(2), path / "c.pt")
    return path / "c.pt"


def a_text(path: Path) -> Path:
    (path / "notes.txt").write_text("remember the milk")
    return path / "notes.txt"


def loose_files(path: Path) -> Path:
    torch.save({}, path / "model.pt")
    return path


# What is at a path, and the format that it has.
SAMPLES: list[tuple[Callable[[Path], Path], str]] = [
    (torch_file, "torch"),
    (lambda path: torch_file(path, _use_new_zipfile_serialization=False), "torch"),
    (a_file_of_safetensors, "hf"),
    (lambda path: a_file_of_safetensors(path).parent, "hf"),
    (shards_of_safetensors, "hf"),
    (shards_beside_a_stranger, "hf"),
    (parts_of_ranks, "hf"),
    (tied, "hf"),
    (whole_bin, "pytorch_model"),
    (shards_of_bin, "pytorch_model"),
    (folder, "dcp"),
    (every_dtype, "dcp"),
    (lambda path: Path(zero_files.write(path / "zero", 2, 3)), "deepspeed-zero"),
    (lambda path: Path(zero_files.write(path / "zero", 3, 2, latest=True)), "deepspeed-zero"),
    (universal, "deepspeed-universal"),
]
DAMAGED: list[Callable[[Path], Path]] = [
    a_cut_file,
    a_flip,
    a_folder_without_data,
    a_module,
    a_step,
    a_tensor,
    a_text,
    an_archive,
    loose_files,
    without_a_part,
    without_a_shard,
    without_any_shard,
    lambda path: path / "nowhere",
]


def imported(source: Path, run: Path) -> dict[str, torch.Tensor]:
    """The tensors of an import by their dotted names."""
    statehold.import_step(source, f"{run}@1", name="")
    step = statehold.open(run)[1]
    return {name: step.load(name) for name in step.tensors}


def made(make: Callable[[Path], Path], where: Path) -> Path:
    (where / "source").mkdir()
    return make(where / "source")


@pytest.mark.thorough
@pytest.mark.parametrize(("make", "name"), SAMPLES)
def test_both_read_the_same_tensors(tmp_path: Path, make: Any, name: str) -> None:
    source = made(make, tmp_path)
    assert recognised(str(source))[0] is FORMATS[name]
    found = imported(source, tmp_path / "run")
    assert found
    live = {each: zeros_like(tensor) for each, tensor in found.items()}
    report = restore_stock(source, live)
    assert sorted(report.loaded) == sorted(found)
    assert {n: bits(tensor) for n, tensor in live.items()} == {n: bits(found[n]) for n in found}


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of any dtype: torch fills some of them only as bytes."""
    return torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def verdict(call: Callable[[], object]) -> tuple[type, str]:
    with pytest.raises(StateholdError) as caught:
        call()
    return type(caught.value), caught.value.summary


@pytest.mark.parametrize("make", DAMAGED)
def test_both_refuse_it_alike(tmp_path: Path, make: Any) -> None:
    source = made(make, tmp_path)
    of_import = verdict(lambda: statehold.import_step(source, f"{tmp_path / 'run'}@1"))
    assert verdict(lambda: restore_stock(source, {"a.w": torch.zeros(3, 4)})) == of_import
