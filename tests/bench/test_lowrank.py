"""The benchmarks of low-rank models, small: the table of the documents, and saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.lowrank import published, saves

PAGE = Path(__file__).parents[2] / "docs/lowrank.md"


def test_the_page_has_the_computed_times() -> None:
    _, _, *rows = published.lines()
    page = PAGE.read_text("utf-8")
    assert [row for row in rows if row not in page] == []
    assert len(rows) == 4


def test_saves_of_both_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--width", "64", "--layers", "1", "--rounds", "1", "--saves", "2"]
    assert saves.run([str(tmp_path), *words]) == 0
    *_, full, pairs = capsys.readouterr().out.splitlines()
    assert full.startswith("| full | 4 |")
    assert pairs.startswith("| bottleneck | 4 |")
    assert not list(tmp_path.iterdir())
