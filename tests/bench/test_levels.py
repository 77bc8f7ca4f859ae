"""The benchmarks of levels run, and compare what they restored with its source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240

pytest.importorskip("torch")
if not Path("/dev/shm").is_dir():
    pytest.skip("there is no /dev/shm", allow_module_level=True)

WORDS = {
    "restart": ["--reps", "1"],
    "promotion": ["--reps", "1", "--steps", "6", "--step-seconds", "0.001"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of both benchmarks, which run at once, by case."""
    out = tmp_path_factory.mktemp("levels")
    path = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", f"bench.{name}", "--size", "smoke", "--out", out / name, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, words in WORDS.items()
    }
    found = {}
    for name, process in running.items():
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        whole = json.loads((out / name / f"{name}.json").read_text())
        found[name] = {row["case"]: row for row in whole["rows"]}
    return found


def test_restarts_are_compared_with_the_disk(rows: dict[str, dict[str, Any]]) -> None:
    assert set(rows["restart"]) == {"memory", "disk", "warm"}
    assert rows["restart"]["disk"]["faster"]["median"] == 1
    for row in rows["restart"].values():
        assert 0 < row["restore_s"]["min"] <= row["process_s"]["max"]


def test_copies_are_compared_with_the_loop_alone(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["promotion"]["alone"]["ratio"]["median"] == 1
    assert rows["promotion"]["promoting"]["ratio"]["min"] > 0
