"""The benchmark of resilience runs, and compares gradients with those of DDP."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support import benches

torch = pytest.importorskip("torch")


@pytest.mark.skipif(os.environ.get("STATEHOLD_BENCH") != "all", reason="STATEHOLD_BENCH=all")
def test_sums_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.resilience import sums
    from bench.resilience.contestants import DDP, EXACT, NONE
    from bench.resilience.run import main

    monkeypatch.setattr(sums, "CONTESTANTS", (NONE, DDP, EXACT))
    monkeypatch.setattr(sums, "SHARES", (2,))
    words = [
        "--only",
        "sums",
        "--layers",
        "1",
        "--features",
        "64",
        "--rounds",
        "1",
        "--out",
        str(tmp_path),
    ]
    with benches.forked_processes():
        assert main(words) == 0
    records = json.loads((tmp_path / "resilience-sums.json").read_text())
    assert [record["of"] for record in records] == ["time"] * 2 + ["memory"] * 3
    assert all(len(record["step_s"]) == 1 for record in records[:2])
    announced = {record["name"]: record["announced_bytes"] / record["numel"] for record in records}
    assert announced[EXACT] > 8
    assert "exact, 2" in capsys.readouterr().out


@pytest.mark.skipif(os.environ.get("STATEHOLD_BENCH") != "all", reason="STATEHOLD_BENCH=all")
def test_a_transfer_to_a_joiner_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.resilience.run import main

    words = ["--only", "rejoin", "--state-mb", "20", "--step-s", "0.02", "--rounds", "1"]
    with benches.forked_processes():
        assert main([*words, "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "resilience-rejoin.json").read_text())
    assert [record["trainer"] for record in records] == ["waits", "computes"]
    assert all(len(record["turns"]) == 2 and record["bytes"] > 10**7 for record in records)
    assert "work, with/without" in capsys.readouterr().out
