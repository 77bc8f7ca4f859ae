"""The benchmark of scores runs, and gives each case a figure for each text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from support.benches import ROOT

pytest.importorskip("transformers")


def test_every_score_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--train-seconds", "0", "--texts", "2", "--prompt", "192", "--more", "20"]
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.paged_eviction import main

    assert main([*words, "--long", "192", "--decoded", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "paged-eviction.json").read_text())
    assert len(found["records"]) == 2
    assert len(found["rows"]) == 3 * (1 + 6 * 3)
    assert all(math.isfinite(row["nll"]) for row in found["rows"])
    by_percent = {row["percent"]: row["bytes"] for row in found["speed"]}
    assert by_percent[25] < by_percent[50] < by_percent[75] < by_percent[100]
