"""torch.distributed.checkpoint reads our data files with its own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statehold.layout.layout import Layout
from statehold.layout.plan import plan_save
from statehold.layout.share import PlanCache, share
from statehold.ranks.membership import Membership
from support.meshes import local_specs, mesh
from support.steps import spec

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

SPECS = [
    spec("model.layers.0.wq.weight", "BF16", 8, 16),
    spec("optimizer.state.model.layers.0.wq.weight.exp_avg", "F32", 8, 16),
    spec("model.head.bias", "F32", 5, eager=True),
    spec("optimizer.state.model.layers.0.wq.weight.step", "F32"),
    spec("mask", "BOOL", 3),
    spec("positions", "I64", 2, 2),
]
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "BOOL": torch.bool, "I64": torch.int64}


def write_step(directory: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        tensor.name: torch.randint(0, 2, tensor.shape, generator=generator).to(DTYPES[tensor.dtype])
        for tensor in SPECS
    }
    plan = plan_save(SPECS, step=4)
    data = [bytes(tensors[s.name].reshape(-1).view(torch.uint8).tolist()) for s in plan.specs]
    (directory / plan.file_name).write_bytes(plan.header + b"".join(data))
    return tensors


# DCP warns about running without a process group, and about its own internals.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [[s.name for s in SPECS], ["mask", "model.head.bias"]])
def test_the_hugging_face_reader_loads_our_file(tmp_path: Path, names: list[str]) -> None:
    expected = write_step(tmp_path)
    state = {name: torch.full_like(expected[name], 1) for name in names}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=str(tmp_path)))
    for name in names:
        assert torch.equal(state[name], expected[name])


@pytest.mark.filterwarnings("ignore")
def test_its_metadata_has_our_shapes_and_dtypes(tmp_path: Path) -> None:
    write_step(tmp_path)
    reader = dcp.HuggingFaceStorageReader(path=str(tmp_path))
    found = reader.read_metadata().state_dict_metadata
    assert {name: tuple(item.size) for name, item in found.items()} == {
        tensor.name: tensor.shape for tensor in SPECS
    }
    assert {name: item.properties.dtype for name, item in found.items()} == {
        tensor.name: DTYPES[tensor.dtype] for tensor in SPECS
    }


# FSDP of 2 over tensor parallel of 2; "large" is cut over its replicas, "small" has one writer.
GRID = mesh(2, 2)
SHARDED: dict[str, tuple[str, tuple[int, ...], Layout]] = {
    "both": ("BF16", (6, 5), Layout(GRID, ((1, 0), (0, 0)))),
    "columns": ("F32", (4, 6), Layout(GRID, ((1, 1), (0, 0)))),
    "large": ("U8", (4096, 2048), Layout(GRID)),
    "rows_of_replicas": ("F32", (4096, 1024), Layout(GRID, ((1, 0),))),
    "small": ("F32", (3,), Layout(GRID)),
    "step": ("F32", (), Layout(GRID)),
    "uneven": ("I64", (3, 2), Layout(GRID, ((0, 0), (1, 0)))),
}


def write_sharded_step(directory: Path) -> dict[str, Any]:
    """Four files, each from what its rank would hold, by nothing but the plans."""
    numpy = pytest.importorskip("numpy")
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: torch.randint(0, 100, shape, generator=generator).to(STORED[dtype])
        for name, (dtype, shape, _) in SHARDED.items()
    }
    for rank in range(4):
        plan = PlanCache(Membership(rank, 4)).get(local_specs(SHARDED, rank), 4).save
        data = bytearray(plan.header)
        for own in plan.specs:
            assert own.offsets is not None
            ends = [a + n for a, n in zip(own.offsets, own.shape, strict=True)]
            box = tensors[own.name][tuple(map(slice, own.offsets, ends))].contiguous()
            data += numpy.asarray(box.reshape(-1).view(torch.uint8)).tobytes()
        assert len(data) == plan.file_bytes
        (directory / plan.file_name).write_bytes(data)
    return tensors


STORED = DTYPES | {"U8": torch.uint8}


@pytest.mark.filterwarnings("ignore")
def test_the_hugging_face_reader_assembles_a_sharded_step(tmp_path: Path) -> None:
    expected = write_sharded_step(tmp_path)
    state = {name: torch.full_like(value, 1) for name, value in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=str(tmp_path)))
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_the_sharded_step_is_one_with_cuts() -> None:
    held = {item.name: item for item in share(local_specs(SHARDED, 0), 0).held}
    assert held["large"].layout == Layout(GRID, ((0, 0), (1, 0)))
    assert held["rows_of_replicas"].layout == Layout(GRID, ((1, 0), (0, 0)))
    assert held["small"].layout == Layout(GRID)
