"""Jobs that SLURM warns: each makes one last save, and goes on bit for bit when it starts again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.slurm.cluster import PROGRAMS, Cluster
from infra.slurm.jobs import SAVED, SRUN, TORCHRUN, WARNED_SHELL, WHOLE, Job
from infra.slurm.trainer import HOLD

pytestmark = pytest.mark.programs(*PROGRAMS, root=True)

# Two nodes on this machine, with a rank each.
RANK_EACH = TORCHRUN.replace("--nproc-per-node 8", "--nproc-per-node 1")
LAUNCHERS = pytest.mark.parametrize("script", [SRUN, RANK_EACH], ids=["srun", "torchrun"])


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    with contextlib.ExitStack() as made:
        yield lambda script: made.enter_context(
            contextlib.closing(Job(cluster, tmp_path / "job", script))
        )


def check_continued(job: Job, undisturbed: Job) -> None:
    """It has ended well after one restart. No step was lost, none repeated, and no bit differs."""
    facts = job.ended()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log()
    assert facts["Restarts"] == "1", job.log()
    check_whole(job, undisturbed)


def check_whole(job: Job, undisturbed: Job) -> None:
    first, again = job.starts()
    assert first == 0
    assert again >= HOLD, job.log()
    assert job.starts(1) == [first, again]
    assert job.steps() == job.steps(1) == WHOLE
    assert job.losses() == undisturbed.losses()


def test_a_job_that_nothing_disturbs_has_completed(undisturbed: Job) -> None:
    facts = undisturbed.ended()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), undisturbed.log()
    assert undisturbed.starts() == [0]
    assert undisturbed.steps() == undisturbed.steps(1) == WHOLE


@LAUNCHERS
def test_scancel_with_term_is_one_last_save(
    make: Callable[[str], Job], undisturbed: Job, script: str
) -> None:
    job = make(script)
    job.start_and_hold()
    job.cluster.tell("scancel", "--signal=TERM", job.number)
    check_continued(job, undisturbed)


@pytest.mark.parametrize(
    ("script", "options"), [(SRUN, ()), (WARNED_SHELL, ("--batch",))], ids=["ranks", "shell"]
)
def test_scancel_with_usr1_is_one_last_save(
    make: Callable[[str], Job], undisturbed: Job, script: str, options: tuple[str, ...]
) -> None:
    job = make(script)
    job.start_and_hold()
    job.cluster.tell("scancel", "--signal=USR1", *options, job.number)
    check_continued(job, undisturbed)


@LAUNCHERS
def test_scancel_is_one_last_save_before_the_end(
    make: Callable[[str], Job], undisturbed: Job, script: str
) -> None:
    job = make(script)
    job.start_and_hold()
    job.cluster.tell("scancel", job.number)
    assert job.ended()["JobState"] == "CANCELLED"
    job.start()
    assert job.ended()["JobState"] == "COMPLETED", job.log()
    check_whole(job, undisturbed)


@LAUNCHERS
def test_a_requeued_job_goes_on(make: Callable[[str], Job], undisturbed: Job, script: str) -> None:
    job = make(script)
    job.start_and_hold()
    job.cluster.tell("scontrol", "requeue", job.number)
    check_continued(job, undisturbed)


@LAUNCHERS
def test_a_preempted_job_leaves_in_its_grace_time_and_goes_on(
    make: Callable[[str], Job], undisturbed: Job, script: str, tmp_path: Path
) -> None:
    job = make(script)
    job.start_and_hold("--exclusive")
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\ntrue\n")
    other = job.cluster.submit(urgent, "--partition=high", "--nodes=2", "--exclusive")
    check_continued(job, undisturbed)
    assert job.cluster.ended(other)["JobState"] == "COMPLETED"


@pytest.mark.parametrize(
    "script", [SRUN, WARNED_SHELL, RANK_EACH], ids=["srun", "shell", "torchrun"]
)
def test_a_job_that_meets_its_time_limit_goes_on(
    make: Callable[[str], Job], undisturbed: Job, script: str
) -> None:
    """The script asks for its warning 90 or 60 s before that."""
    job = make(script)
    job.start_and_hold()
    job.reach_its_limit()
    check_continued(job, undisturbed)


@LAUNCHERS
def test_a_killed_rank_ends_its_job_and_the_next_job_goes_on(
    make: Callable[[str], Job], undisturbed: Job, script: str
) -> None:
    job = make(script)
    job.start_and_hold()
    os.kill(job.pid(1), signal.SIGKILL)
    job.go()
    if script == SRUN:
        assert job.ended()["JobState"] == "FAILED"
        job.start()
    assert job.ended()["JobState"] == "COMPLETED", job.log()
    assert job.starts() == job.starts(1) == [0, SAVED]
    assert job.steps() == [*WHOLE[: HOLD - 1], *WHOLE[SAVED:]]
    assert job.losses() == undisturbed.losses()
