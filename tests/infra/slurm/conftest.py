"""Clusters for the tests of SLURM, and the job that nothing disturbs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.slurm.cluster import Cluster, running
from infra.slurm.jobs import SRUN, Job


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running(Path(folder)) as started:
        yield started


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that has ended, and trained without a break."""
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed") / "job", SRUN)
    job.go()
    job.start()
    job.ended()
    return job
