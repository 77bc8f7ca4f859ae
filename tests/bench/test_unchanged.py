"""The benchmark of unchanged bytes runs, and compares what it wrote with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import benches

pytest.importorskip("torch")
pytest.importorskip("safetensors")


def found(tmp_path: Path, *groups: str) -> dict[str, dict[str, object]]:
    words = ("--smoke", "--rounds", "1", "--out", tmp_path)
    benches.run("bench.unchanged", "--only", *groups, *words)
    return {
        group: json.loads((tmp_path / f"unchanged-{group}.json").read_text()) for group in groups
    }


@pytest.mark.thorough
def test_every_group_runs(tmp_path: Path) -> None:
    groups = found(tmp_path, "lora", "proof", "full", "many", "fork")
    assert all(group["rows"] and group["targets"] for group in groups.values())
    told = {each["what"]: each["is_met"] for group in groups.values() for each in group["targets"]}
    assert told["bytes written, of 1.02 x what changed + 1 MiB"]
    assert told["fork, data bytes"]
    assert groups["many"]["facts"]["steps that made them"] > 2


@pytest.mark.thorough
def test_a_later_step_sends_its_own_bytes_alone(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: no object stores")
    told = {each["what"]: each["is_met"] for each in found(tmp_path, "sweep")["sweep"]["targets"]}
    assert told["later step, bytes up of 1.02 x its own + 1 MiB"]
