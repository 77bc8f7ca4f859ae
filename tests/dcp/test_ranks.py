"""dcp.save and dcp.load on several ranks: the checks of support/dcp_checks.py, run once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import statehold
from statehold.cli import main
from support import dcp_checks
from support.gloo import run_ranks

pytestmark = pytest.mark.thorough

WORLD_SIZE = 4
CHECKS = sorted(name for name in vars(dcp_checks) if name.startswith("check_"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> list[dict[str, str]]:
    return run_ranks(dcp_checks.outcomes, WORLD_SIZE, directory, str(directory))


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(outcomes: list[dict[str, str]], check: str) -> None:
    failed = [f"rank {rank}: {found[check]}" for rank, found in enumerate(outcomes) if found[check]]
    assert not failed, "\n".join(failed)


def test_an_asynchronous_save_in_a_process_of_its_own(tmp_path: Path) -> None:
    run_ranks(dcp_checks.async_in_a_process, 2, tmp_path, str(tmp_path))


@pytest.mark.usefixtures("outcomes")
def test_a_checkpointer_of_one_rank_restores_it(directory: Path) -> None:
    run = directory / "check_for_one"
    live = {"model": dcp_checks.Net(2), "n": 0}
    with statehold.Checkpointer(run, staging_bytes="32MiB") as ckpt:
        got = ckpt.restore(live)
        assert got == 7
    assert live["n"] == 5
    torch.testing.assert_close(live["model"].state_dict(), torch.load(run / "whole.pt"))


@pytest.mark.usefixtures("outcomes")
def test_the_command_verifies_what_they_left(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {path.parent for path in directory.rglob("manifest.json")}
    assert len(found) > 5
    bad = {path.name for path in found if main(["verify", str(path)])}
    told = capsys.readouterr()
    damaged = {path.name for path in found if "check_missing_file" in str(path)}
    assert bad == damaged, told
