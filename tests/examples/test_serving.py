"""The example of a server beside a trainer: each of its answers is that of a whole step."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support import scripts

pytest.importorskip("statehold._core", reason="the native module is not built")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_every_answer_comes_from_one_whole_step(tmp_path: Path) -> None:
    done = scripts.run(
        [str(ROOT / "examples/serving.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    told = re.search(r"(\d+) answers from (\d+) steps, 0 of them from no whole step", done.stdout)
    assert told
    assert int(told[1]) >= int(told[2]) > 0
    assert "step 30: " in done.stdout
