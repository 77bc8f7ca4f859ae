"""What containers take away: the job trains, and another container goes on from its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.containers.pods import NEEDED, WHOLE, Pod, in_
from support.seccomp import IO_URING_SETUP

pytestmark = NEEDED

MIB = 1 << 20
SHM_BYTES = 64 * MIB
# Python and torch need a folder for temporary files: an empty volume at /tmp is usual.
READ_ONLY = (
    "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--dev", "/dev", "--proc", "/proc",
    "--die-with-parent",
)  # fmt: skip
NOBODY = ("--unshare-user", "--uid", "4711", "--gid", "4711", "--unsetenv", "HOME")


def volume(folder: Path) -> tuple[str, ...]:
    """What alone may be written to."""
    return ("--bind", str(folder / "volume"), str(folder / "volume"))


def both(folder: Path, arguments: tuple[str, ...], **options: Any) -> tuple[Pod, Pod]:
    """A job in a container, and the same job in another one, which goes on."""
    pods = []
    for restored, last in ((None, 3), (3, 6)):
        log = folder / f"log-{last}"
        with Pod(arguments, in_(folder), last, log, **options) as pod:
            assert pod.end() == 0, pod.log()
        pod.check(restored, last)
        pods.append(pod)
    return pods[0], pods[1]


def test_io_uring_is_forbidden(tmp_path: Path) -> None:
    """As by the profiles of most container engines."""
    for pod in both(tmp_path, WHOLE, forbid=IO_URING_SETUP):
        assert pod.said("end") == ["threads"]
        assert pod.log().count("saving with threads instead of io_uring") == 1
        assert "Operation not permitted" in pod.log()


def test_shared_memory_of_64_megabytes(tmp_path: Path) -> None:
    """Docker's default: the first step fits, and others go to the next level."""
    shm = ("--size", str(SHM_BYTES), "--tmpfs", "/dev/shm")
    first, second = both(tmp_path, (*WHOLE, *shm), memory="", width=2048)
    assert "level memory cannot take" in first.log()
    assert "level memory cannot take" in second.log()


@pytest.mark.parametrize("user", [(), NOBODY], ids=["root", "nobody"])
def test_a_read_only_root(tmp_path: Path, user: tuple[str, ...]) -> None:
    """And a user without HOME and without an entry, as with `runAsUser`."""
    in_(tmp_path)
    arguments = (*READ_ONLY, *volume(tmp_path), *user)
    first, _ = both(tmp_path, arguments)
    assert "Read-only" not in first.log()


@pytest.mark.parametrize("user", [(), NOBODY], ids=["root", "nobody"])
def test_a_memory_level_of_a_user_without_an_entry(tmp_path: Path, user: tuple[str, ...]) -> None:
    in_(tmp_path)
    both(tmp_path, (*READ_ONLY, *volume(tmp_path), "--tmpfs", "/dev/shm", *user), memory="")


def test_the_job_is_process_1(tmp_path: Path) -> None:
    first, _ = both(tmp_path, (*WHOLE, "--unshare-pid", "--as-pid-1"))
    assert first.said("pid") == [1]
