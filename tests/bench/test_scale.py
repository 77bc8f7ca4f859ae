"""The benchmark of growth runs: each group at small sizes, and what it says of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.benches import ROOT

pytest.importorskip("torch")


@pytest.mark.thorough
def test_each_group_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.scale import GROUPS, main

    assert main(["--most", "100", "--out", str(tmp_path), "--dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert {row["group"] for row in rows if "call" in row} == set(GROUPS)
    saves = [row for row in rows if row["group"] == "a save's commit"]
    assert [row["ranks"] for row in saves] == [8, 64]
    assert all(row["calls"] < 8 * row["ranks"] for row in saves)
