"""Ranks that a launcher has started, as it says in the environment of each."""

from __future__ import annotations

from pathlib import Path

import pytest

import statehold
from statehold.errors import UsageError
from statehold.options import Options
from statehold.ranks.joining import join, launched
from support import scripts
from support.faults import SMALL

NAMES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
         "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")  # fmt: skip
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # of the allocation that the ranks run in


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def launch(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environ",
    [
        TORCHRUN,
        MPIRUN,
        SRUN,
        {"PMI_RANK": "1", "PMI_SIZE": "3"},
        {**BATCH, **TORCHRUN},
        {**BATCH, **MPIRUN},
        {**SRUN, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "3"},  # a step of a part of the job
    ],
)
def test_a_rank_is_found_under_each_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    launch(monkeypatch, environ)
    assert launched() == (1, 3)
    peers = join(str(tmp_path), Options(coordination="directory"))
    assert peers is not None
    assert (peers.rank, peers.world_size) == (1, 3)


@pytest.mark.parametrize("environ", [{}, {"RANK": "1"}, {"SLURM_PROCID": "x", "SLURM_NTASKS": "3"}])
def test_without_a_launcher_there_are_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    launch(monkeypatch, environ)
    assert launched() is None
    with pytest.raises(UsageError, match="the rank and the number of ranks") as caught:
        join(str(tmp_path), Options(coordination="directory"))
    assert all(f"{name}={value!r}" in str(caught.value) for name, value in environ.items())


OTHER = """
import sys, statehold
try:
    with statehold.Checkpointer(sys.argv[1], staging_bytes="32MiB") as ckpt:
        ckpt.save(2, {"step": 2})
except statehold.StateholdError as error:
    print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("environ", [{}, SRUN])
def test_a_rank_that_knows_no_other_is_told_how_to_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    launch(monkeypatch, environ)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"step": 1}).wait("committed", 30)
        told = scripts.run(["-c", OTHER, tmp_path / "run"]).stdout
    assert "stop the other job" in told
    assert ("rank 1 of 3" in told and 'coordination="directory"' in told) == bool(environ)
