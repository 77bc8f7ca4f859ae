"""Steps of ranks in any layout come as whole tensors, and only what differs is read."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statehold
from statehold import _core
from statehold.io.clients import open_engine
from statehold.layout.layout import Layout
from statehold.subscription import spare
from support import laid_out
from support.faults import DEADLINE_S
from support.laid_out import MIB, Disk, tensors_of
from support.meshes import mesh

ROWS, COLUMNS = 0, 1
LAYOUTS = {
    "rows": Layout(mesh(4), ((0, ROWS),)),
    "columns": Layout(mesh(4), ((0, COLUMNS),)),
    "both": Layout(mesh(2, 2), ((0, ROWS), (1, COLUMNS))),
}


@pytest.fixture
def arrays() -> dict[str, Any]:
    chance = np.random.default_rng(0)
    return {name: chance.standard_normal((1030, 1500)).astype(np.float32) for name in ("a", "b")}


@pytest.fixture
def disk(tmp_path: Path, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(laid_out, "RUN", str(tmp_path / "run"))
    fs = _core.open_fs("threads")
    engine = open_engine(fs, 2 * MIB, MIB, 2)
    yield Disk(fs, engine, arrays)  # type: ignore[arg-type]
    engine.close()
    fs.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_ranks(
    name: str, tmp_path: Path, disk: Disk, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(arrays, dict.fromkeys(arrays, LAYOUTS[name]))
    live = {name: torch.zeros(array.shape) for name, array in arrays.items()}
    whole_bytes = sum(tensor.nbytes for tensor in live.values())
    with statehold.subscribe(tmp_path / "run", live) as updates:
        for step in (1, 2):
            monkeypatch.setattr(laid_out, "STEP", step)
            arrays["a"][7, 3] += 1
            disk.save(tensors, 4)
            update = updates.wait(DEADLINE_S)
            assert update is not None
            update.apply()
            assert update.step == step
            assert all(np.array_equal(live[name].numpy(), arrays[name]) for name in arrays)
    assert 0 < update.changed_bytes <= MIB < whole_bytes
    assert update.read_bytes < whole_bytes // 4


def test_a_step_may_have_more_files_than_the_process_descriptors(
    tmp_path: Path, disk: Disk, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step was tried for ever."""
    opened, original = [], spare.open_engine

    def counted(*given: Any) -> Any:
        files = map(os.path.realpath, Path("/proc/self/fd").iterdir())
        opened.append(sum(file.endswith(".safetensors") for file in files))
        return original(*given)

    monkeypatch.setattr(spare, "open_engine", counted)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    disk.save(tensors_of(arrays, dict.fromkeys(arrays, LAYOUTS["rows"])), 4)
    live = {name: torch.zeros(array.shape) for name, array in arrays.items()}
    with statehold.subscribe(tmp_path / "run", live) as updates:
        update = updates.wait(DEADLINE_S)
        assert update is not None
        update.apply()
    assert all(np.array_equal(live[name].numpy(), arrays[name]) for name in arrays)
    assert opened == [2]
