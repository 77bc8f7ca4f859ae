"""Levels in memory under SLURM: what a job leaves there, and what an agent can save of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.slurm.cluster import PROGRAMS, Cluster, running
from infra.slurm.jobs import SAVED, SRUN, TASK, WHOLE, Job

pytestmark = pytest.mark.programs(*PROGRAMS, root=True)

ONE_RANK = ("--nodes=1", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def private() -> Iterator[Cluster]:
    """A cluster whose jobs have a /dev/shm and a /tmp of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/var/tmp") as folder,
        running(Path(folder), private_memory=True) as started,
    ):
        yield started


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that jobs with a /tmp of their own see, too."""
    with tempfile.TemporaryDirectory(prefix="job-", dir="/var/tmp") as there:
        yield Path(there, "job")


@pytest.fixture(scope="session")
def alone(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of one rank that has ended, and trained without a break."""
    job = Job(cluster, tmp_path_factory.mktemp("alone") / "job", SRUN)
    job.go()
    job.start(*ONE_RANK)
    job.ended()
    return job


@pytest.fixture
def make(memory: Path, folder: Path) -> Iterator[Callable[[Cluster], Job]]:
    """A job with a level in memory."""
    with contextlib.ExitStack() as made:
        yield lambda cluster: made.enter_context(
            contextlib.closing(Job(cluster, folder, SRUN, memory))
        )


def killed(job: Job, command: str) -> None:
    """Start the job, kill its trainer in the middle of the training, and wait for its end."""
    script = job.folder / "job.sh"
    trainer = "exec python train.py"
    assert trainer in script.read_text()
    script.write_text(script.read_text().replace(trainer, f"exec {command}"))
    job.start_and_hold(*ONE_RANK, ranks=1)
    os.kill(job.pid(0), signal.SIGKILL)
    assert job.ended()["JobState"] == "FAILED"
    job.go()


def check_continued(job: Job, alone: Job, *, at: int) -> None:
    """Start the job again. It goes on at this step, bit for bit."""
    job.start(*ONE_RANK)
    assert job.ended()["JobState"] == "COMPLETED", job.log()
    assert job.starts() == [0, at], job.log()
    assert job.steps()[-len(WHOLE[at:]) :] == WHOLE[at:]
    assert job.losses() == alone.losses()
    assert len(alone.losses()[0]) == len(WHOLE)


def test_a_step_in_memory_waits_for_the_next_job(
    cluster: Cluster, make: Callable[[Cluster], Job], memory: Path, alone: Job
) -> None:
    job = make(cluster)
    killed(job, f"python train.py {memory} alone")
    check_continued(job, alone, at=SAVED)


def test_a_step_in_private_memory_ends_with_its_job(
    private: Cluster, make: Callable[[Cluster], Job], memory: Path, alone: Job
) -> None:
    job = make(private)
    killed(job, f"python train.py {memory} alone")
    assert not memory.exists()
    check_continued(job, alone, at=0)


@pytest.mark.parametrize("kind", ["cluster", "private"])
def test_a_shell_that_waits_lets_the_agent_copy_the_newest_step(
    request: pytest.FixtureRequest,
    make: Callable[[Cluster], Job],
    memory: Path,
    alone: Job,
    kind: str,
) -> None:
    job = make(request.getfixturevalue(kind))
    assert "python train.py" in TASK
    task = TASK.replace("python train.py", f"python train.py {memory}")
    (job.folder / "task.sh").write_text(f"RUN={job.run}\n{task}")
    killed(job, "bash task.sh")
    shutil.rmtree(memory, ignore_errors=True)
    check_continued(job, alone, at=SAVED)


def test_without_a_shell_the_agent_ends_with_the_task(
    cluster: Cluster, make: Callable[[Cluster], Job], memory: Path, alone: Job
) -> None:
    """The log has said so, and the step waits in memory."""
    job = make(cluster)
    killed(job, f"python train.py {memory}")
    assert "the agent of this run ends with the SLURM step" in job.log()
    check_continued(job, alone, at=SAVED)
