"""The checkpointer of torchtitan: its Trainer on two ranks, killed inside a save, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from support.resumed import FRAMEWORKS, check, job, ran, three

SCRIPT = FRAMEWORKS / "titan_ranks.py"


@pytest.mark.parametrize("way", ["option", "example"])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    check(tmp_path, ran(three(SCRIPT, tmp_path, way, ranks=2)))
    assert len(list((tmp_path / "cut").glob("step-*"))) == 2  # keep_latest_k


def test_a_step_that_is_only_loaded_discards_no_newer_one(tmp_path: Path) -> None:
    out, load = tmp_path / "run", ["--checkpoint.load_step=5", "--checkpoint.load_only"]
    jobs = [job(SCRIPT, "option", out, *more, ranks=2) for more in ([], load)]
    assert ran(jobs) == [0, 0]
    assert [path.name[-1] for path in sorted(out.glob("step-*"))] == ["5", "6"]
