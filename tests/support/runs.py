"""Runs on disk for commands to look at, written by pure modules and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from statehold.format.entries import NOTHING, About, record_file
from statehold.format.manifest import Manifest
from statehold.layout.plan import BLOCK_BYTES, plan_save
from support.steps import spec, true_sums

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
CREATED = "2026-11-21T07:00:00+00:00"

Arrays = dict[str, tuple[str, np.ndarray[Any, Any]]]


def write_step(run: Path, step: int, arrays: Arrays, about: About = NOTHING, **values: Any) -> Path:
    """A step of one rank."""
    specs = [spec(name, dtype, *array.shape) for name, (dtype, array) in arrays.items()]
    plan = plan_save(specs, step=step)
    contents = [array.tobytes() for _, array in arrays.values()]
    content = plan.header + b"".join(contents[i] for i in plan.source_index)
    file, tensors = record_file(plan, true_sums(plan, content))
    state = {"tensors": {name: {"$tensor": name} for name in arrays}, **values}
    manifest = Manifest(step, 1, CREATED, "test", BLOCK_BYTES, (file,), tensors, state, about)
    directory = run / f"step-{step:012d}"
    directory.mkdir(parents=True)
    (directory / file.name).write_bytes(content)
    (directory / "manifest.json").write_bytes(manifest.encode())
    return directory


def arrays_of(scale: float = 1.0) -> Arrays:
    grid = (np.arange(600, dtype="<f4") * scale).reshape(20, 30)
    return {
        "model.weight": ("F32", grid),
        "model.bias": ("F64", np.array([1.0, -2.0, 0.0, np.nan])),
        "count": ("I64", np.array(7)),
        "empty": ("F32", np.zeros((0, 2), "<f4")),
        "mask": ("BOOL", np.array([True, False, True])),
    }
