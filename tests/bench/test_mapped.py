"""The benchmark of the memory level runs, and compares what it wrote with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import benches

pytest.importorskip("torch")


def test_every_case_runs(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    benches.run("bench.mapped", "--size", "smoke", "--reps", "2", "--out", tmp_path)
    rows = json.loads((tmp_path / "mapped.json").read_text())["rows"]
    assert len(rows) == 8
    assert all(row["wall_s"]["min"] > 0 and row["cpu_s_ratio"]["min"] > 0 for row in rows)
