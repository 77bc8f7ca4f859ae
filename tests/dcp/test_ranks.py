"""dcp.save and dcp.load on several ranks: the checks of support/dcp_checks.py, run once."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import dcp_checks
from support.gloo import run_ranks

WORLD_SIZE = 4
CHECKS = sorted(name for name in vars(dcp_checks) if name.startswith("check_"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    directory: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(dcp_checks.outcomes, WORLD_SIZE, directory, str(directory))


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(outcomes: list[dict[str, str]], check: str) -> None:
    failed = [f"rank {rank}: {found[check]}" for rank, found in enumerate(outcomes) if found[check]]
    assert not failed, "\n".join(failed)
