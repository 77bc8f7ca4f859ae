"""torch.distributed.checkpoint reads our data files with its own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statehold.plan import plan_save
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
