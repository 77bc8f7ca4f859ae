"""The example of an elastic job: its losses have the same bits on any number of workers.

Under torchrun, with workers that are killed and nodes that come and go: tests/infra/launchers.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from support.gloo import run_ranks

pytest.importorskip("statehold._core", reason="the native module is not built")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/elastic.py"
STEPS = 24


def train(rank: int, ranks: int, run: str) -> None:
    """The example, in ranks that have found each other."""
    from torch import distributed

    main = runpy.run_path(str(EXAMPLE))["main"]
    distributed.init_process_group = distributed.destroy_process_group = lambda *_: None
    main(run)


@pytest.mark.thorough
def test_no_bit_of_a_loss_depends_on_the_number_of_workers(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 3):
        run = tmp_path / str(ranks)
        run_ranks(train, ranks, tmp_path, str(run))
        found.append((run / "losses.txt").read_text())
    assert found[0] == found[1]
    assert len(found[0].split(",")) == STEPS
