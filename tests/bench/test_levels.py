"""The benchmarks of levels run, and compare what they restored with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import benches

pytestmark = pytest.mark.thorough

pytest.importorskip("torch")
if not Path("/dev/shm").is_dir():
    pytest.skip("there is no /dev/shm", allow_module_level=True)

WORDS = {
    "restart": ["--reps", "1"],
    "promotion": ["--reps", "1", "--steps", "6", "--step-seconds", "0.001"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of both benchmarks, by case."""
    from bench import promotion, restart

    out, found = tmp_path_factory.mktemp("levels"), {}
    with benches.forked_processes():
        for name, main in (("restart", restart.main), ("promotion", promotion.main)):
            assert main(["--size", "smoke", "--out", str(out / name), *WORDS[name]]) == 0
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
