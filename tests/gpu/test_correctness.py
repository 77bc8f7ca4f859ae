"""The checks of bench.gpu that are about what is right, on states of a moderate size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.gpu.checks import CHECKS
from bench.gpu.figures import MISSED
from bench.gpu.task import Task

from support.faults import DEADLINE_S
from support.gpu import needs_cuda

pytestmark = needs_cuda

ROOT = Path(__file__).resolve().parents[2]
STATE_BYTES = 10**9  # much more than the staging memory of these checks


@pytest.mark.parametrize(
    "name", ["replay", "capture", "fingerprints", "two-streams", "memory", "scaler", "dropped"]
)
def test_nothing_is_missed(tmp_path: Path, name: str) -> None:
    found = list(CHECKS[name].run(Task(name, "cuda", str(tmp_path), STATE_BYTES)))
    assert found
    assert not [figure for figure in found if figure.verdict == MISSED]


def test_no_context_is_made_on_another_device(tmp_path: Path) -> None:
    """In a process of its own: this one has a context on the first device."""
    words = ["--only", "contexts", "--gigabytes", "1", "--out", str(tmp_path)]
    path = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads((tmp_path / "gpu.json").read_text())["checks"]["contexts"]
    if found["verdict"] == "skipped":
        pytest.skip(found["reason"])
    assert found["verdict"] == "reached", found
