"""The benchmark of object stores runs and reports; its figures mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: no object stores")

from bench import objects


def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = objects.main(["--size", "17MiB", "--rounds", "1", "--out", str(tmp_path)])
    assert code == 0
    record = json.loads((tmp_path / "results.json").read_text())["GB/s and processor s a GB"]
    assert record.keys() == {"upload", "download"}
    for found in record.values():
        assert all(len(samples) == 1 and samples[0][0] > 0 for samples in found.values())
        assert "statehold" in found
    assert "of the fastest peer" in capsys.readouterr().out
