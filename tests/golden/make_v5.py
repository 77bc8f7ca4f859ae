"""Writes tests/golden/v5: the steps of version 4 with what version 5 added, `about`.

Run once; the result is committed and never written again.

    PYTHONPATH=src:tests python tests/golden/make_v5.py
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from statehold.format.entries import About, Origin
from statehold.format.manifest import Manifest

HERE = Path(__file__).parent
ALONE, TOGETHER = 11, 12
PARENT = Origin("/runs/base", 1000, "0123456789abcdef" * 4)
METRICS = {"val_loss": 1.25, "tokens": 1_000_000.0, "broken": float("nan"), "low": float("-inf")}
SAID = {ALONE: About(METRICS, ("best", "für später"), PARENT), TOGETHER: About(tags=("milestone",))}


def write(step: int) -> None:
    name = f"step-{step:012d}"
    shutil.copytree(HERE / "v4" / name, HERE / "v5" / name)
    path = HERE / "v5" / name / "manifest.json"
    manifest = Manifest.decode(path.read_bytes(), str(path))
    path.write_bytes(replace(manifest, about=SAID[step]).encode())


if __name__ == "__main__":
    for each in SAID:
        write(each)
