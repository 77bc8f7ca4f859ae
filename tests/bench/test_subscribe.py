"""The benchmark of subscribers runs, and compares what they have with the content of each step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import benches
from support.benches import ROOT

pytest.importorskip("torch")


@pytest.mark.thorough
def test_every_kind_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    words = ["--size", "smoke", "--reps", "2", "--turns", "2", "--steps", "1"]
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.subscribe import main

    with benches.forked_processes():
        status = main([*words, "--step-seconds", "0", "--out", str(tmp_path)])
    assert status == 0
    found = json.loads((tmp_path / "subscribe.json").read_text())
    assert [row["kind"] for row in found["rows"]] == ["tensors", "scattered"]
    for record in found["records"]:
        assert len(record["updates"]) == 2
        assert all(update["difference"] is None for update in record["updates"])
        assert record["loop"]["updates"] > 0
