"""A run begins from a step of another run, and stands on its own names."""

from __future__ import annotations

import errno

import pytest

from sim.crash_states import Sample
from statehold.checkpoint.levels.forking import fork
from statehold.errors import (
    CorruptionError,
    RunBusyError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from statehold.format.entries import Origin, sha256
from support.faults import SMALL
from support.in_memory import SimFs, checkpointer_on
from support.levels import remove, step_path
from support.plain_runs import (
    BASE,
    CHILD,
    RetiringOnLink,
    check,
    check_on_ranks,
    content,
    data_of,
    manifest_of,
    save,
    save_on_ranks,
)
from support.ranks import Ranks


def test_a_fork_writes_no_data_and_says_where_it_comes_from(fs: SimFs) -> None:
    save(fs, BASE, 1, 2)
    raw = fs.read_file(f"{step_path(BASE, 2)}/manifest.json", 1 << 20)
    fs.record()
    forked = fork(fs, step_path(BASE, 2), CHILD)
    assert forked.parent == Origin(BASE, 2, sha256(raw))
    assert forked.copied_bytes == 0 < forked.linked_bytes
    assert not [each for each in fs.recorded if each.startswith("write ")]
    assert manifest_of(fs, CHILD, 2).about.parent == forked.parent
    check(fs, CHILD, 2)
    check(fs, BASE, 1, 2)


def test_each_run_stands_on_its_own_names(fs: SimFs) -> None:
    save(fs, BASE, 1)
    fork(fs, step_path(BASE, 1), CHILD)
    save(fs, BASE, 2, 3, 4, keep=1)  # retires step 1, and would write over its files
    save(fs, CHILD, 5, 6, keep=2)
    check(fs, BASE, 4)
    check(fs, CHILD, 5, 6)
    remove(fs, BASE)
    check(fs, CHILD, 5, 6)


def test_a_base_that_is_deleted_takes_nothing_away(fs: SimFs) -> None:
    save(fs, BASE, 1)
    fork(fs, step_path(BASE, 1), CHILD)
    remove(fs, BASE)
    check(fs, CHILD, 1)


def test_a_fork_of_a_fork(fs: SimFs) -> None:
    save(fs, BASE, 1)
    fork(fs, step_path(BASE, 1), CHILD)
    again = fork(fs, step_path(CHILD, 1), "/runs/grandchild")
    assert again.parent.run == CHILD
    check(fs, "/runs/grandchild", 1)


def test_a_step_of_several_ranks(fs: SimFs) -> None:
    save_on_ranks(fs, 3, BASE, 1)
    fork(fs, step_path(BASE, 1), CHILD)
    with Ranks(fs, 3, CHILD) as ranks:
        check_on_ranks(ranks, 1)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_file_system_without_links_gets_a_copy(fs: SimFs, code: int) -> None:
    save(fs, BASE, 1)
    fs.fail_next("link", code, 1 << 20)
    forked = fork(fs, step_path(BASE, 1), CHILD)
    assert fs.fired["injected link"] == 1
    assert forked.linked_bytes == 0 < forked.copied_bytes
    fs.set_faults()
    check(fs, CHILD, 1)


def test_a_damaged_file_is_not_copied(fs: SimFs) -> None:
    save(fs, BASE, 1)
    fs.corrupt(data_of(fs, BASE, 1), 5000, 1)
    fs.fail_next("link", errno.EXDEV, 1 << 20)
    with pytest.raises(CorruptionError):
        fork(fs, step_path(BASE, 1), CHILD)
    fs.set_faults()
    check(fs, CHILD)


def test_what_cannot_be_is_refused(fs: SimFs) -> None:
    save(fs, BASE, 1)
    save(fs, CHILD, 9)
    with pytest.raises(UsageError, match="must have no step"):
        fork(fs, step_path(BASE, 1), CHILD)
    check(fs, CHILD, 9)
    with pytest.raises(UsageError, match="of its own"):
        fork(fs, step_path(BASE, 1), BASE)
    with pytest.raises(StorageError):
        fork(fs, step_path(BASE, 3), "/runs/another")
    with checkpointer_on(fs, "/runs/busy", **SMALL) as ckpt:
        ckpt.save(1, content(1))
        with pytest.raises(RunBusyError):
            fork(fs, step_path(BASE, 1), "/runs/busy")


def test_a_step_that_is_retired_meanwhile(fs: SimFs) -> None:
    save(fs, BASE, 1)
    with pytest.raises(StepNotFoundError, match="retired"):
        fork(RetiringOnLink(fs, BASE, 1), step_path(BASE, 1), CHILD)  # type: ignore[arg-type]
    check(fs, CHILD)


@pytest.mark.parametrize("operation", ["mkdir", "link", "write_file", "sync_dir", "rename"])
@pytest.mark.parametrize("skip", range(3))
def test_after_an_error_there_is_no_step_or_a_whole_one(
    fs: SimFs, operation: str, skip: int
) -> None:
    save(fs, BASE, 1)
    fs.fail_next(operation, errno.EIO, 1, skip)
    try:
        fork(fs, step_path(BASE, 1), CHILD)
    except StorageError:
        assert fs.fired[f"injected {operation}"] == 1
    fs.set_faults()
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        steps = ckpt.steps()
    check(fs, CHILD, *steps)
    check(fs, BASE, 1)


@pytest.mark.thorough
def test_a_crash_leaves_no_step_or_a_whole_one(fs: SimFs) -> None:
    save(fs, BASE, 1)
    fs.record()
    fork(fs, step_path(BASE, 1), CHILD)
    states, committed = 0, 0
    for moment in range(len(fs.recorded)):
        for disk in Sample(8, whole=True).of(fs, moment, 0):
            states += 1
            with checkpointer_on(disk, CHILD, **SMALL) as ckpt:
                steps = ckpt.steps()
            check(disk, CHILD, *steps)
            check(disk, BASE, 1)
            committed += bool(steps)
    assert states > 10
    assert 0 < committed < states
