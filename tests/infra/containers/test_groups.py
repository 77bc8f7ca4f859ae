"""Limits of memory and of processors, of real control groups: slower or less, and never killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from infra.containers.pods import NEEDED, WHOLE, Pod, in_
from support.cgroups import memory_group, why_no_group

pytestmark = [
    NEEDED,
    pytest.mark.skipif(why_no_group() is not None, reason=str(why_no_group())),
]

MIB = 1 << 20
STAGING = 512 * MIB
JOB = 448 * MIB  # what the job takes without its staging memory, with its step of 50 MB


@pytest.mark.parametrize(
    "limit", [JOB + STAGING // 2, JOB + STAGING, JOB + 2 * STAGING], ids=["below", "at", "above"]
)
@pytest.mark.parametrize("staging", [STAGING, None], ids=["asked", "chosen"])
def test_memory_below_at_and_above_the_staging_memory(
    tmp_path: Path, limit: int, staging: int | None
) -> None:
    options = {} if staging is None else {"staging": staging}
    with memory_group(f"{limit}-{staging}", limit) as group:
        for restored, last in ((None, 2), (2, 4)):
            log = tmp_path / f"log-{last}"
            with Pod(WHOLE, in_(tmp_path), last, log, groups=[group], width=2048, **options) as pod:
                assert pod.end() == 0, pod.log()
            pod.check(restored, last)


CPU = Path("/sys/fs/cgroup/cpu")
UNIFIED = Path("/sys/fs/cgroup")


@contextmanager
def half_a_processor(name: str) -> Iterator[Path]:
    """A group that has no more."""
    root = CPU if CPU.is_dir() else UNIFIED
    group = root / f"statehold-test-{os.getpid()}-{name}"
    try:
        group.mkdir()
        if root is CPU:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("50000")
        else:
            (group / "cpu.max").write_text("50000 100000")
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"a group with a quota cannot be made: {error}")
    try:
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def test_half_a_processor(tmp_path: Path) -> None:
    with half_a_processor("half") as group:
        for restored, last in ((None, 3), (3, 6)):
            log = tmp_path / f"log-{last}"
            with Pod(WHOLE, in_(tmp_path), last, log, groups=[str(group)], width=512) as pod:
                assert pod.end() == 0, pod.log()
            pod.check(restored, last)
        counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        assert int(counts["nr_throttled"]) > 0
