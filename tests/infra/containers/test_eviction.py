"""A pod that has to go: TERM, after a grace KILL, and the job goes on where its volume is next."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from infra.containers.pods import NEEDED, Pod, in_
from support.agents import steps_in, wait_for

pytestmark = NEEDED

FOREVER = 100_000  # steps
GRACE_S = 60
STEPS_UNTIL_EVICTED = 4


def node(folder: Path, name: str, at: str) -> tuple[str, ...]:
    """A pod on another node: a host name, processes and shared memory of its own, and the volume,
    which is attached `at` a path."""
    return (
        "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--tmpfs", "/mnt",
        "--bind", str(folder / "volume"), at,
        "--dev", "/dev", "--tmpfs", "/dev/shm", "--proc", "/proc", "--die-with-parent",
        "--unshare-pid", "--as-pid-1", "--unshare-uts", "--hostname", name,
    )  # fmt: skip


def evict(pod: Pod, grace_s: float) -> int:
    """As a cluster does; the exit code of the pod."""
    job = pod.job
    send(job, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        pod.process.wait(grace_s)
    send(job, signal.SIGKILL)
    return pod.end()


def send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


@pytest.mark.parametrize("levels", [{}, {"memory": ""}], ids=["volume", "memory"])
@pytest.mark.parametrize("grace_s", [GRACE_S, 0], ids=["in-time", "killed"])
def test_an_evicted_job_goes_on_where_its_volume_is(
    tmp_path: Path, levels: dict[str, str], grace_s: int
) -> None:
    in_(tmp_path)
    log = tmp_path / "log-a"
    with Pod(
        node(tmp_path, "pod-a", "/mnt/a"), Path("/mnt/a/run"), FOREVER, log, leave_s=30, **levels
    ) as pod:
        pod.until(STEPS_UNTIL_EVICTED)
        if levels:  # step 1 is copied to the volume beside the training
            wait_for(lambda: steps_in(tmp_path / "volume/run"), "step 1 is not at the volume")
        code = evict(pod, grace_s)
        last = pod.said("step")[-1]
        assert (code in (0, 75)) == bool(grace_s), pod.log()
    assert last >= STEPS_UNTIL_EVICTED
    log = tmp_path / "log-b"
    with Pod(
        node(tmp_path, "pod-b", "/mnt/b/c"), Path("/mnt/b/c/run"), last + 4, log, **levels
    ) as pod:
        assert pod.end() == 0, pod.log()
    (restored,) = pod.said("restored")
    if grace_s or not levels:
        # The last step may have been committed, and the pod killed before it said so.
        assert last <= restored <= last + 1
    else:  # the memory was lost with its node
        assert restored == 1
    pod.check(restored, last + 4)
