"""Ray Train: workers that are killed, and a whole Ray; no bit of a loss differs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.launchers.jobs import DEADLINE_S, ROOT, Told
from infra.launchers.worker import HOLD

EXAMPLE = ROOT / "examples/ray_train.py"
SCRIPT = Path(__file__).with_name("ray_job.py")
WORKERS = 2

pytestmark = pytest.mark.programs("ray")


class Job(Told):
    """The example on a Ray of its own, which ends with the process of the script."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._process: subprocess.Popen[bytes] | None = None
        # The name of a socket in it must be short.
        self._rays = tempfile.mkdtemp(prefix="ray-", dir="/tmp")

    def start(self) -> None:
        environment = self.environment(
            packages(), HOME=str(self.folder), RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0"
        )
        command = [sys.executable, SCRIPT, EXAMPLE, self.folder, self._rays]
        with open(self.folder / "log-ray", "ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start_and_hold(self) -> None:
        self.start()
        self.wait_for("holding", WORKERS, lambda: self.process.poll() is None)

    def check(self, starts: list[int], losses: list[str]) -> None:
        """It ends well. Workers have started at these steps."""
        code = self.process.wait(DEADLINE_S)
        assert code == 0, self.log()
        assert self.starts() == [(step, WORKERS) for step in starts for _ in range(WORKERS)]
        assert self.losses() == losses

    def losses(self) -> list[str]:
        return [(self.folder / f"run/losses-{rank}.txt").read_text() for rank in range(WORKERS)]

    def end(self) -> None:
        """Kill it, and all of its Ray."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.end_workers()

    def close(self) -> None:
        self.end()
        shutil.rmtree(self._rays, ignore_errors=True)


def packages() -> str:
    """The folder with the modules of the `ray` that is found."""
    python = Path(shutil.which("ray") or "").with_name("python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path)) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of the ranks of a job that nothing disturbs."""
    with contextlib.closing(Job(tmp_path_factory.mktemp("undisturbed"))) as job:
        job.go()
        job.start()
        code = job.process.wait(DEADLINE_S)
        assert code == 0, job.log()
        assert job.starts() == [(0, WORKERS)] * WORKERS
        return job.losses()


def test_after_a_killed_worker_ray_starts_all_and_they_go_on(
    job: Job, undisturbed: list[str]
) -> None:
    job.start_and_hold()
    os.kill(job.pids()[-1], signal.SIGKILL)
    job.go()
    job.check([0, HOLD], undisturbed)


def test_a_job_whose_ray_was_killed_goes_on_when_it_is_started_again(
    job: Job, undisturbed: list[str]
) -> None:
    job.start_and_hold()
    job.end()
    job.go()
    job.start()
    job.check([0, HOLD], undisturbed)
