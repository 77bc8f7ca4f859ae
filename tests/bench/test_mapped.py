"""The benchmark of the memory level runs, and compares what it wrote with its source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240

pytest.importorskip("torch")


def test_every_case_runs(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    path = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = ["--size", "smoke", "--reps", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.mapped", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "mapped.json").read_text())["rows"]
    assert len(rows) == 8
    assert all(row["wall_s"]["min"] > 0 and row["cpu_s_ratio"]["min"] > 0 for row in rows)
