"""The benchmark of offloaded optimizers runs, and compares parameters with torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import benches

pytest.importorskip("torch")


def test_every_case_runs(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    benches.run("bench.offload", "--params", "3e6", "--updates", "1", "--rounds", "1",
                one, f"{other}=1GB")  # fmt: skip
    assert not list(one.rglob("*.state"))
    assert not list(other.rglob("*.state"))
