"""The checkpointer of torchtitan: its Trainer on two ranks, killed inside a save, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from support.resumed import FRAMEWORKS, check, ran, three


@pytest.mark.parametrize("way", ["option", "example"])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    check(tmp_path, ran(three(FRAMEWORKS / "titan_ranks.py", tmp_path, way, ranks=2)))
    assert len(list((tmp_path / "cut").glob("step-*"))) == 2  # keep_latest_k
