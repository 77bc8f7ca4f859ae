"""Steps of the drop-in and of a Checkpointer, each read by the other on four and on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import dcp_restore_checks
from support.gloo import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("restore")
    run_ranks(dcp_restore_checks.save, 4, directory, str(directory))
    return directory


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [4, 2])
def test_on_ranks(saved: Path, world_size: int) -> None:
    run_ranks(dcp_restore_checks.restore, world_size, saved, str(saved))
