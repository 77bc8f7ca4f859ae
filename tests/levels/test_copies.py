"""Steps go on from level to level: the same bytes, when they are due, whatever fails meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import statehold
from sim.crash_states import crash_states
from statehold import Directory, Memory
from statehold.checkpoint.levels import promoting
from statehold.checkpoint.levels.promoting import NICENESS
from statehold.errors import ChecksumError, NoSpaceError, StepOrderError, StorageError, WaitTimeout
from statehold.steps.target import DirectoryPlace
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.inside import borrowed, end, inside, promoter
from support.levels import (
    FAR,
    LATER,
    NEAR,
    HeldCopy,
    files,
    only,
    opened_on,
    remove,
    save,
    settle,
    status,
    step_path,
    steps_at,
)
from support.training import Training, bits

DATA = "rank-00000-of-00001.safetensors"


@pytest.fixture
def fs() -> SimFs:
    return SimFs(seed=1)


def content(step: int, numel: int = 1000) -> dict[str, object]:
    return {"w": torch.arange(numel, dtype=torch.int32) * 31 + step, "step": step}


def blank(numel: int = 1000) -> dict[str, object]:
    return {"w": torch.zeros(numel, dtype=torch.int32), "step": -1}


def holds(found: dict[str, object], step: int) -> bool:
    expected = content(step, found["w"].numel())
    return found["step"] == step and torch.equal(found["w"], expected["w"])


# -- what is copied --------------------------------------------------------------------------------


def test_what_is_copied_is_the_step_byte_for_byte(fs) -> None:
    training = Training(width=384)  # more than a buffer
    with opened_on(fs) as ckpt:
        for step in (1, 2):
            training.step()
            save(ckpt, step, training.state)
        ckpt.flush(DEADLINE_S)
        assert (status(ckpt).newest, status(ckpt).copying, status(ckpt).error) == (2, None, None)
        assert status(ckpt).bytes_done == status(ckpt).bytes_total > 1 << 20
    assert files(fs, FAR, 2) == files(fs, NEAR, 2)
    live = Training(seed=5, width=384)
    with only(fs, FAR) as ckpt:
        got = ckpt.restore(live.state)
    assert got == 2
    assert bits(live) == bits(training)


def test_real_files_from_memory_to_disk_open_with_stock_safetensors(
    tmp_path: Path, memory: Path
) -> None:
    weights = torch.randn(1 << 19)
    levels = [Memory(path=memory, keep=1), Directory()]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        save(ckpt, 1, {"w": weights})
        save(ckpt, 2, {"w": weights + 1})
    names = sorted(each.name for each in (tmp_path / "run/step-000000000002").iterdir())
    assert names == ["manifest.json", DATA]
    for name in names:
        one, two = (base / "step-000000000002" / name for base in (memory, tmp_path / "run"))
        assert one.read_bytes() == two.read_bytes()
    assert torch.equal(load_file(tmp_path / "run/step-000000000002" / DATA)["w"], weights + 1)
    assert [each.name for each in memory.glob("step-*")] == ["step-000000000002"]


def test_a_level_gets_the_steps_that_its_cadence_says(fs) -> None:
    with opened_on(fs, far={"every": 3}) as ckpt:
        for step in range(1, 9):
            save(ckpt, step, content(step))
            settle(ckpt)
        assert steps_at(fs, FAR) == [1, 3, 6]
        assert steps_at(fs, NEAR) == list(range(1, 9))
        assert ckpt.steps() == list(range(1, 9))
    assert steps_at(fs, FAR) == [1, 3, 6, 8]  # close() brings the newest


def test_a_level_gets_a_step_in_so_much_time(fs) -> None:
    now_s = [1000.0]
    ckpt = opened_on(fs, far={"every": "1h"})
    borrowed(ckpt).clock = lambda: now_s[0]
    with ckpt:
        save(ckpt, 1, content(1))  # an empty level is due
        settle(ckpt)
        assert status(ckpt).newest == 1
        now_s[0] += 3599.0
        save(ckpt, 2, content(2))
        settle(ckpt)
        assert status(ckpt).newest == 1
        now_s[0] += 1.0
        save(ckpt, 3, content(3))
        save(ckpt, 4, content(4))
        settle(ckpt)
        assert steps_at(fs, FAR) == [1, 3]


def later_life(fs: SimFs, first: dict[str, Any], far: dict[str, Any], step: int) -> SimFs:
    """The disk of a job that was killed after it had saved `step`."""
    with opened_on(fs, first, far) as ckpt:
        ckpt.restore(blank())
        saved = ckpt.save(step, content(step))
        if not saved.is_skipped:
            saved.wait("committed", DEADLINE_S)
            settle(ckpt)
        fs.record()
        fs.mkdir("/end")
        return fs.at_moment(0)


@pytest.mark.parametrize("where", [NEAR, FAR])
def test_so_much_time_goes_on_over_restarts(fs, monkeypatch, where: str) -> None:
    """A job that is killed more often than that gets a step there all the same."""
    moment = time.time()
    first, far = ({"every": "30min"}, {}) if where == NEAR else ({}, {"every": "30min"})
    for life in range(1, 8):
        monkeypatch.setattr(time, "time", lambda now_s=moment + 600 * life: now_s)
        fs = later_life(fs, first, far, life)
    assert steps_at(fs, where) == [1, 4, 7]


def test_a_busy_level_gets_the_newest_step_once_it_is_free(fs) -> None:
    with opened_on(fs) as ckpt, HeldCopy(ckpt) as held:
        for step in (1, 2, 3):
            save(ckpt, step, content(step))
        must(held.waiting.wait(DEADLINE_S))
        assert status(ckpt).copying == 1
        inside(ckpt).pipeline.drain()
        held.go_on.set()
        settle(ckpt)
        save(ckpt, 4, content(4))
        settle(ckpt)
        assert steps_at(fs, FAR) == [1, 4]


def test_each_level_keeps_its_own_number_and_a_step_stays_while_it_is_copied(fs) -> None:
    with opened_on(fs, near={"keep": 1}, far={"keep": 2}) as ckpt:
        with HeldCopy(ckpt) as held:
            save(ckpt, 1, content(1))
            must(held.waiting.wait(DEADLINE_S))
            save(ckpt, 2, content(2))
            inside(ckpt).pipeline.drain()
            assert steps_at(fs, NEAR) == [1, 2]
        settle(ckpt)
        assert steps_at(fs, NEAR) == [2]
        assert steps_at(fs, FAR) == [1]
        for step in (3, 4, 5):
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
        assert steps_at(fs, NEAR) == [5]
        assert steps_at(fs, FAR) == [4, 5]


def test_a_step_saved_again_is_copied_again(fs) -> None:
    with opened_on(fs, far=LATER) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
        with HeldCopy(ckpt) as held:
            save(ckpt, 1, content(7))
            must(held.waiting.wait(DEADLINE_S))
            save(ckpt, 1, content(8))  # while the one before is copied
        ckpt.flush(DEADLINE_S)
        assert files(fs, FAR, 1) == files(fs, NEAR, 1)
        ckpt.flush(DEADLINE_S)
        found = blank()
        got = ckpt.restore(found)
        assert got == 1
        assert holds({**found, "step": 8}, 8)


def test_flush_again_and_again(fs) -> None:
    with opened_on(fs, far=LATER) as ckpt:
        ckpt.flush(DEADLINE_S)  # nothing yet
        for step in (1, 2, 3):
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
            ckpt.flush(DEADLINE_S)
        assert steps_at(fs, FAR) == [1, 2, 3]


def test_a_flush_that_is_not_done_in_time_says_so_and_the_copy_goes_on(fs) -> None:
    with opened_on(fs) as ckpt:
        with HeldCopy(ckpt) as held:
            save(ckpt, 1, content(1))
            must(held.waiting.wait(DEADLINE_S))
            with pytest.raises(WaitTimeout, match="step 1 did not reach level far in time"):
                ckpt.flush(0.05)
        ckpt.flush(DEADLINE_S)
        assert status(ckpt).newest == 1


def test_rewind_gives_steps_up_at_all_levels(fs) -> None:
    with opened_on(fs, near={"keep": 2}) as ckpt:
        for step in range(1, 6):
            save(ckpt, step, content(step))
            settle(ckpt)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([4, 5], [1, 2, 3, 4, 5])
        with pytest.raises(StepOrderError):
            ckpt.save(3, content(3))
        given_up = ckpt.rewind(2)
        assert given_up == [3, 4, 5]
        assert ckpt.steps() == [1, 2]
        assert status(ckpt).newest == 2
        save(ckpt, 3, content(3))
        settle(ckpt)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([3], [1, 2, 3])


@pytest.mark.parametrize("away", [NEAR, FAR])
def test_a_rewind_without_one_of_the_levels_discards_nothing(fs, away: str) -> None:
    with opened_on(fs) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, content(step))
            settle(ckpt)
    fs.rename(away, "/elsewhere")
    fs.write_file(away, b"no directory")
    with opened_on(fs) as ckpt, pytest.raises(StorageError) as raised:
        ckpt.rewind(1)
    assert raised.value.facts["failed"] == "the rewind to step 1; nothing was discarded"
    fs.unlink(away)
    fs.rename("/elsewhere", away)
    assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1, 2, 3], [1, 2, 3])
    with opened_on(fs) as ckpt:
        assert ckpt.rewind(1) == [2, 3]


@pytest.mark.parametrize("skipped", [0, 2, 3, 5])  # others hold back a directory, or delete it
def test_a_rewind_that_fails_at_a_level_is_completed_by_the_next_one(fs, skipped: int) -> None:
    with opened_on(fs) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, content(step))
            settle(ckpt)
        fs.fail_next("rename", errno.EIO, 1, skipped)
        with pytest.raises(StorageError) as raised:
            ckpt.rewind(1)
        assert raised.value.facts["failed"] == "the rewind to step 1; some steps may be discarded"
        assert steps_at(fs, NEAR)[-1] > 1  # the nearest level is the last one
        ckpt.rewind(1)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1], [1])


def test_a_lost_level_lets_no_older_step_be_saved_over_newer_ones(fs) -> None:
    with opened_on(fs) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
    remove(fs, NEAR)
    with opened_on(fs) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
        with pytest.raises(StepOrderError, match="step 2 is older than step 3"):
            ckpt.save(2, content(2))
        found = blank()
        got = ckpt.restore(found)
        assert got == 3
        save(ckpt, 4, content(4))
    assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([4], [1, 2, 3, 4])


def test_what_was_saved_where_the_other_level_could_not_be_read_is_not_put_beside_newer(
    fs, caplog, monkeypatch
) -> None:
    with opened_on(fs) as ckpt:
        save(ckpt, 9, content(9))
    remove(fs, NEAR)
    steps, fired = DirectoryPlace.steps, []

    def fail_once(place: DirectoryPlace) -> list[int]:
        if place.name == "far" and not fired:
            fired.append(place)
            raise StorageError("away", errno=errno.EIO, path=FAR)
        return steps(place)

    monkeypatch.setattr(DirectoryPlace, "steps", fail_once)
    with opened_on(fs) as ckpt:
        save(ckpt, 2, content(2))
        settle(ckpt)
        error = status(ckpt).error
        assert isinstance(error, StepOrderError)
        assert steps_at(fs, FAR) == [9]
        got = ckpt.restore(blank())
        assert got == 9
    assert fired
    assert caplog.text.count("level far has step 9, which is newer") == 1


def test_a_step_of_several_ranks_is_copied_whole_by_one(fs) -> None:
    """The ranks that copy are not those that saved."""
    from support.rank_states import state
    from support.ranks import Ranks

    with Ranks(fs, 3, run=NEAR) as ranks:
        ranks.save(1, lambda rank: state(rank, 1))
    with opened_on(fs) as ckpt:
        ckpt.flush(DEADLINE_S)
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)
    assert len(files(fs, FAR, 1)) == 7


# -- what fails ------------------------------------------------------------------------------------

OPERATIONS = (
    "read_file", "open_read", "mkdir", "open_write", "write", "read", "sync", "sync_dir",
    "write_file", "rename", "unlink", "rmdir",
)  # fmt: skip


def leftovers(fs: SimFs) -> list[str]:
    return [name for name, _ in fs.listdir(FAR) if name.endswith(".partial")]


@pytest.mark.thorough
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_of_a_copy_may_fail_and_the_next_step_gets_there(operation: str) -> None:
    for skip in range(100):
        fs = SimFs(seed=skip)
        with opened_on(fs, near={"keep": 2}, far={**LATER, "keep": 2}) as ckpt:
            for step in (1, 2, 3):
                save(ckpt, step, content(step))
                ckpt.flush(DEADLINE_S)
            save(ckpt, 4, content(4))
            inside(ckpt).pipeline.drain()
            fs.fail_next(operation, errno.EIO, 1, skip)
            ckpt.flush(DEADLINE_S)
            fired = fs.fired.get("injected", 0)
            fs.set_faults()
            if status(ckpt).error is not None:
                assert isinstance(status(ckpt).error, StorageError)
                assert status(ckpt).newest == 3
                assert all(".copy-" in each for each in leftovers(fs))
            assert {3} <= set(steps_at(fs, FAR)) <= {2, 3, 4}
            save(ckpt, 5, content(5))
            ckpt.flush(DEADLINE_S)
            assert status(ckpt).error is None
            assert status(ckpt).newest == 5
            assert files(fs, FAR, 5) == files(fs, NEAR, 5)
            assert not leftovers(fs)
            got = ckpt.restore(blank())
            assert got == 5
        if not fired:
            break
    assert skip >= 1


def test_a_failed_copy_is_told_and_warned_of_and_saves_go_on(fs, caplog) -> None:
    with opened_on(fs, far=LATER) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
        save(ckpt, 2, content(2))
        fs.fail_next("open_read", errno.EIO)
        ckpt.flush(DEADLINE_S)
        assert fs.fired["injected open_read"] == 1
        error = status(ckpt).error
        assert isinstance(error, StorageError)
        assert error.errno == errno.EIO
        assert status(ckpt).newest == 1
        save(ckpt, 3, content(3))  # due at once, whatever the cadence
        settle(ckpt)
        assert steps_at(fs, FAR) == [1, 3] or steps_at(fs, FAR) == [1]
    assert "step 2 did not reach level far; it stays at level near" in caplog.text
    assert steps_at(fs, FAR)[-1] == 3


def test_old_steps_that_cannot_be_removed_do_not_fail_a_copy(fs, caplog) -> None:
    with opened_on(fs, far={**LATER, "keep": 1}) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
        save(ckpt, 2, content(2))
        inside(ckpt).pipeline.drain()
        fs.fail_next("rename", errno.EIO, 1, 1)  # D6, then R1
        ckpt.flush(DEADLINE_S)
        assert fs.fired["injected rename"] == 1
        assert (status(ckpt).newest, status(ckpt).error) == (2, None)
        assert steps_at(fs, FAR) == [1, 2]
    assert "old steps stay at level far" in caplog.text


@pytest.mark.parametrize("where", ["header", "data", "manifest"])
def test_a_bit_that_flips_before_the_copy_is_never_published(fs, where: str) -> None:
    with opened_on(fs, far=LATER) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
        save(ckpt, 2, content(2))
        path = f"{step_path(NEAR, 2)}/{'manifest.json' if where == 'manifest' else DATA}"
        fs.corrupt(path, 40 if where == "header" else (fs.stat_bytes(path) or 0) - 99, 0x10)
        ckpt.flush(DEADLINE_S)
        error = status(ckpt).error
        assert error is not None
        assert where == "manifest" or isinstance(error, ChecksumError)
        assert steps_at(fs, FAR) == [1]
        save(ckpt, 3, content(3))
        ckpt.flush(DEADLINE_S)
        assert steps_at(fs, FAR)[-1] == 3


def test_a_full_level_fails_its_copies_and_recovers(tmp_path: Path) -> None:
    fs = SimFs(seed=1)
    big = 1 << 18
    with opened_on(fs, near={"keep": 1}, far={**LATER, "keep": 1}) as ckpt:
        save(ckpt, 1, content(1, big))
        ckpt.flush(DEADLINE_S)
        save(ckpt, 2, content(2, big))
        inside(ckpt).pipeline.drain()
        fs.set_faults(capacity=used(fs, "") + 1000)
        ckpt.flush(DEADLINE_S)
        assert isinstance(status(ckpt).error, NoSpaceError)
        assert steps_at(fs, FAR) == [1]
        fs.set_faults()
        save(ckpt, 3, content(3, big))
        ckpt.flush(DEADLINE_S)
        assert status(ckpt).error is None
        assert steps_at(fs, FAR) == [3]


def used(fs: SimFs, path: str) -> int:
    total = 0
    for name, is_dir in fs.listdir(path or "/"):
        inner = f"{path}/{name}"
        total += used(fs, inner) if is_dir else fs.stat_bytes(inner) or 0
    return total


@pytest.mark.thorough
def test_the_power_goes_off_before_every_change_of_a_copy() -> None:
    fs = SimFs(seed=1)
    with opened_on(fs, near={"keep": 2}, far={**LATER, "keep": 1}) as ckpt:
        for step in (1, 2):
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
        save(ckpt, 3, content(3))
        inside(ckpt).pipeline.drain()
        fs.record()
        ckpt.flush(DEADLINE_S)
        assert status(ckpt).newest == 3
    seen: set[tuple[int, ...]] = set()
    for moment in range(len(fs.recorded)):
        for disk in crash_states(fs, moment, 3, 0):
            there = tuple(steps_at(disk, FAR))
            seen.add(there)
            assert there
            with only(disk, FAR) as ckpt:
                for step in there:
                    found = blank()
                    ckpt.restore(found, step)
                    assert holds(found, step)
            with opened_on(disk) as ckpt:
                got = ckpt.restore(blank())
                assert got == 3
                save(ckpt, 4, content(4))
            assert files(disk, FAR, 4) == files(disk, NEAR, 4)
    assert {(2,), (3,)} <= seen


def test_another_jobs_level_is_left_alone(fs) -> None:
    """Two jobs copy into one directory: the second is refused, and clears nothing away."""
    with checkpointer_on(fs, FAR, **SMALL) as owner:
        save(owner, 1, content(1))
        fs.mkdir(f"{FAR}/step-000000000002.partial")
        with opened_on(fs) as ckpt:
            save(ckpt, 2, content(2))
            settle(ckpt)
            assert "already saving into" in str(status(ckpt).error)
        assert fs.is_dir(f"{FAR}/step-000000000002.partial")


def test_a_slow_level_does_not_hold_up_a_fast_one(tmp_path: Path) -> None:
    levels = [
        Directory(),
        Directory(path=tmp_path / "slow", name="slow", bytes_per_s="10KB"),
        Directory(path=tmp_path / "fast", name="fast"),
    ]
    ckpt = statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL)
    try:
        save(ckpt, 1, content(1, 8 << 20))  # an hour at the limit
        inside(ckpt).pipeline.drain()
        promoter(ckpt, "fast").wait(DEADLINE_S)
        assert status(ckpt, "fast").newest == 1
        assert status(ckpt, "slow").copying == 1
    finally:
        inside(ckpt).levels.promotions.close()  # the slow copy is given up
        assert status(ckpt, "slow").newest is None
        end(ckpt, flush=False)
    assert not list((tmp_path / "slow").glob("step-????????????"))


def test_a_copy_leaves_the_processor_to_the_training(tmp_path: Path, monkeypatch) -> None:
    nice = []
    take = DirectoryPlace.take

    def seen(place: DirectoryPlace, copy: object) -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        take(place, copy)

    monkeypatch.setattr(DirectoryPlace, "take", seen)
    monkeypatch.setattr(promoting, "NICENESS", NICENESS)  # which conftest.py has changed
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    levels = [Directory(), Directory(path=tmp_path / "far", name="far")]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
    assert nice == [max(mine, NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


# -- a first level that takes no saves -------------------------------------------------------------


def test_saves_go_to_the_next_level_while_the_first_is_full(tmp_path: Path, caplog) -> None:
    fs = SimFs(seed=1)
    with opened_on(fs, near={"keep": 2}, far={"keep": 3, **LATER}) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
        for step in (2, 3):
            fs.fail_next("open_write", errno.ENOSPC)
            save(ckpt, step, content(step))
            settle(ckpt)
        assert fs.fired["injected open_write"] == 2
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1], [1, 2, 3])
        assert status(ckpt).newest == 3
        with pytest.raises(StepOrderError):
            ckpt.save(2, content(2))
        found = blank()
        got = ckpt.restore(found)
        assert got == 3
        assert holds(found, 3)
        save(ckpt, 4, content(4))
        inside(ckpt).pipeline.drain()
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1, 4], [1, 2, 3])
    assert steps_at(fs, FAR) == [2, 3, 4]
    assert caplog.text.count("level near cannot take step 2; saves go to level far") == 1
    assert "cannot take step 3" not in caplog.text
    assert caplog.text.count("level near takes steps again, from step 4 on") == 1
    assert not [name for name, _ in fs.listdir(NEAR) if "partial" in name]


def test_a_first_level_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    levels = [Memory(path=tmp_path / "file" / "shm"), Directory()]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        save(ckpt, 1, content(1))
        assert ckpt.steps() == [1]
        got = ckpt.restore(blank())
        assert got == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_memory_that_cannot_be_made_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """With the path that statehold chooses, too. The run opens, restores and saves."""
    make = os.mkdir

    def refuse(path: str, *mode: int) -> None:
        if Path(path).name == f"statehold-{os.getuid()}":
            raise OSError(number, os.strerror(number))
        make(path, *mode)

    monkeypatch.setattr(os, "mkdir", refuse)
    for begin in (None, 1):
        levels = [Memory(), Directory(every=10)]
        with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
            assert ckpt.restore(blank()) == begin
            save(ckpt, (begin or 0) + 1, content(1))
            assert ckpt.steps() == [1, 2][: (begin or 0) + 1]
    assert "level memory cannot take step 1; saves go to level directory" in caplog.text
    with (
        statehold.Checkpointer(tmp_path / "alone", levels=[Memory()], **SMALL) as ckpt,
        pytest.raises(StorageError, match="cannot create a memory level"),
    ):
        save(ckpt, 1, content(1))


def test_a_step_that_is_at_the_first_level_is_not_saved_again_behind_it(fs) -> None:
    with opened_on(fs, far=LATER) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)  # or the failure might be a copy's
        fs.fail_next("open_write", errno.ENOSPC)
        with pytest.raises(NoSpaceError):
            save(ckpt, 1, content(7))
        found = blank()
        got = ckpt.restore(found)
        assert got == 1
        assert holds(found, 1)


def test_only_when_no_level_is_left_does_a_save_fail(fs) -> None:
    with opened_on(fs) as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
        fs.fail_next("open_write", errno.ENOSPC, 2)
        with pytest.raises(NoSpaceError) as caught:
            save(ckpt, 2, content(2))
        assert NEAR in caught.value.path
        assert fs.fired["injected open_write"] == 2
        save(ckpt, 3, content(3))
    assert (steps_at(fs, NEAR)[-1], steps_at(fs, FAR)[-1]) == (3, 3)
