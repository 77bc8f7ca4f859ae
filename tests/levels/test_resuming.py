"""A copy that was interrupted goes on where it ended, and believes nothing that it finds."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from sim.crash_states import crash_states
from statehold import _core
from statehold.errors import ClosedError, NoSpaceError, StorageError
from statehold.steps.target import COPY_BUFFERS
from support import scripts
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs
from support.inside import end, promoter
from support.levels import (
    FAR,
    NEAR,
    files,
    opened_on,
    save,
    settle,
    status,
    step_path,
    steps_at,
    two,
)
from support.rank_states import state
from support.ranks import Ranks
from support.travelled import Travelled

DATA = "rank-00000-of-00001.safetensors"
BLOCK = 1 << 20
BLOCKS = 10  # of which a copy holds four in its buffers
NUMEL = BLOCKS * BLOCK // 4 - 2000


def content(step: int) -> dict[str, Any]:
    return {"w": torch.arange(NUMEL, dtype=torch.int32) * 31 + step, "step": step}


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> Travelled:
    return Travelled(monkeypatch)


def stopping(after: int, error: Exception) -> Callable[[], None]:
    """For a throttle: raises once so many blocks have passed."""
    passed = itertools.count()

    def stop() -> None:
        if next(passed) >= after:
            raise error

    return stop


def interrupted(ckpt: statehold.Checkpointer, after: int, error: Exception | None = None) -> None:
    """The copy that comes next ends before its block number `after`; the header is the first."""
    promoter(ckpt).throttle.give_way = stopping(after, error or ClosedError("the process ends"))


def interrupt(fs: SimFs, step: int, after: int) -> None:
    ckpt = opened_on(fs)
    interrupted(ckpt, after)
    save(ckpt, step, content(step))
    settle(ckpt)
    end(ckpt, flush=False)


def left_of(fs: SimFs, root: str = FAR) -> list[str]:
    return [name for name, _ in fs.listdir(root) if ".copy-" in name]


def missing_bytes(fs: SimFs, step: int) -> int:
    """How many bytes of blocks are not as they should be; the first is always copied."""
    (folder,) = left_of(fs)
    whole = fs.read_file(f"{step_path(NEAR, step)}/{DATA}", 1 << 30)
    if fs.stat_bytes(f"{FAR}/{folder}/{DATA}") is None:
        return len(whole)
    found = fs.read_file(f"{FAR}/{folder}/{DATA}", 1 << 30)
    total = 0
    for begin in range(0, len(whole), BLOCK):
        block = whole[begin : begin + BLOCK]
        if not begin or found[begin : begin + BLOCK][: len(block)] != block:
            total += len(block)
    return total


@pytest.mark.thorough
@pytest.mark.parametrize("after", range(BLOCKS + 2))
def test_only_what_is_missing_travels(after: int, travelled: Travelled) -> None:
    fs = SimFs(seed=after)
    interrupt(fs, 1, after)
    assert steps_at(fs, FAR) == ([] if after <= BLOCKS else [1])
    expected = missing_bytes(fs, 1) if after <= BLOCKS else 0
    travelled.reads.clear()
    with opened_on(fs) as ckpt:
        ckpt.flush(DEADLINE_S)
        assert (status(ckpt).newest, status(ckpt).error) == (1, None)
    assert travelled.nbytes == expected
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)
    assert not left_of(fs)


def test_what_is_there_is_not_written_again(travelled: Travelled) -> None:
    fs = SimFs(seed=1)
    interrupt(fs, 1, BLOCKS)
    missing = -(-missing_bytes(fs, 1) // BLOCK)
    with opened_on(fs) as ckpt:
        fs.record()
        ckpt.flush(DEADLINE_S)
    written = [each for each in fs.recorded if each.startswith("write ")]
    assert len(written) == missing <= 1 + COPY_BUFFERS
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)


@pytest.mark.parametrize("where", [100, 3 * BLOCK + 77, -1])
def test_what_was_left_is_not_believed(where: int, travelled: Travelled) -> None:
    """The right size, and wrong bytes: that block travels again, and no other."""
    fs = SimFs(seed=1)
    interrupt(fs, 1, BLOCKS)
    (folder,) = left_of(fs)
    path = f"{FAR}/{folder}/{DATA}"
    whole = fs.read_file(f"{step_path(NEAR, 1)}/{DATA}", 1 << 30)
    fs.unlink(path)
    fs.write_file(path, whole)
    fs.corrupt(path, where % len(whole), 0x10)
    expected = missing_bytes(fs, 1)
    assert (
        expected == {100: BLOCK, 3 * BLOCK + 77: 2 * BLOCK, -1: BLOCK + len(whole) % BLOCK}[where]
    )
    travelled.reads.clear()
    with opened_on(fs) as ckpt:
        ckpt.flush(DEADLINE_S)
        assert status(ckpt).error is None
    assert travelled.nbytes == expected
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)


def test_a_file_of_another_size_is_of_use_as_far_as_it_goes(travelled: Travelled) -> None:
    fs = SimFs(seed=1)
    interrupt(fs, 1, BLOCKS)
    (folder,) = left_of(fs)
    path = f"{FAR}/{folder}/{DATA}"
    whole = fs.read_file(f"{step_path(NEAR, 1)}/{DATA}", 1 << 30)
    fs.unlink(path)
    fs.write_file(path, whole[: 2 * BLOCK + 5])
    travelled.reads.clear()
    with opened_on(fs) as ckpt:
        ckpt.flush(DEADLINE_S)
    assert travelled.nbytes == len(whole) - BLOCK
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)


def test_nothing_is_taken_for_a_step_that_was_saved_again(travelled: Travelled) -> None:
    fs = SimFs(seed=1)
    interrupt(fs, 1, BLOCKS)
    assert left_of(fs)
    with opened_on(fs, far={"every": "1h"}) as ckpt:
        travelled.reads.clear()
        save(ckpt, 1, content(9))
        ckpt.flush(DEADLINE_S)
        whole = fs.stat_bytes(f"{step_path(NEAR, 1)}/{DATA}")
        assert travelled.nbytes == whole
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)
    assert not left_of(fs)


def test_what_was_left_goes_when_another_step_comes() -> None:
    fs = SimFs(seed=1)
    interrupt(fs, 1, BLOCKS)
    with opened_on(fs) as ckpt:
        save(ckpt, 2, content(2))
        ckpt.flush(DEADLINE_S)
    assert steps_at(fs, FAR) == [2]
    assert not left_of(fs)


def test_a_copy_that_failed_goes_on_in_the_same_process(travelled: Travelled) -> None:
    fs = SimFs(seed=1)
    with opened_on(fs) as ckpt:
        interrupted(ckpt, 4, StorageError("away", errno=5, path=FAR))
        save(ckpt, 1, content(1))
        settle(ckpt)
        expected = missing_bytes(fs, 1)
        interrupted(ckpt, 1000)
        travelled.reads.clear()
        ckpt.flush(DEADLINE_S)
        assert status(ckpt).error is None
    assert travelled.nbytes == expected


def test_a_level_that_is_full_is_not_kept_full() -> None:
    fs = SimFs(seed=1)
    with opened_on(fs) as ckpt:
        interrupted(ckpt, 3, NoSpaceError("full", errno=28, path=FAR))
        save(ckpt, 1, content(1))
        settle(ckpt)
        assert isinstance(status(ckpt).error, NoSpaceError)
        assert not left_of(fs)
        interrupted(ckpt, 1000)


def test_a_file_that_somebody_has_open_is_not_taken(travelled: Travelled) -> None:
    fs = SimFs(seed=1)
    interrupt(fs, 1, BLOCKS)
    (folder,) = left_of(fs)
    held = fs.open_read(f"{FAR}/{folder}/{DATA}")
    travelled.reads.clear()
    with opened_on(fs) as ckpt:
        ckpt.flush(DEADLINE_S)
    held.close()
    assert travelled.nbytes == fs.stat_bytes(f"{step_path(NEAR, 1)}/{DATA}")
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)


def test_the_power_goes_off_before_every_change_of_a_copy_that_goes_on() -> None:
    fs = SimFs(seed=1)
    ckpt = opened_on(fs)
    interrupted(ckpt, 3)
    save(ckpt, 1, {"w": torch.arange(3 * BLOCK // 4 - 2000), "step": 1})
    settle(ckpt)
    end(ckpt, flush=False)
    assert left_of(fs)
    with opened_on(fs) as ckpt:
        fs.record()
        ckpt.flush(DEADLINE_S)
    for moment in range(len(fs.recorded)):
        for disk in crash_states(fs, moment, 1, 0):
            with opened_on(disk) as ckpt:
                ckpt.flush(DEADLINE_S)
                assert status(ckpt).error is None
                assert files(disk, FAR, 1) == files(disk, NEAR, 1)
                save(ckpt, 2, {"step": 2})
            assert not left_of(disk)


@pytest.mark.parametrize("others", [1, 2, 3])
def test_ranks_go_on_with_what_ranks_have_left(others: int, travelled: Travelled) -> None:
    """Whoever copies, and however many: every file is found by its name."""
    fs = SimFs(seed=1)
    ranks = Ranks(fs, 2, run="/run", levels=two())
    for ckpt in ranks.ckpts:
        interrupted(ckpt, 1)  # a file of theirs is a header and one block
    ranks.save(1, lambda rank: state(rank, 1))
    ranks.each(lambda rank: settle(ranks.ckpts[rank]))
    ranks.outcomes(lambda rank: end(ranks.ckpts[rank], flush=False))
    assert len(left_of(fs)) == 1
    names = {name for name, _ in fs.listdir(f"{FAR}/{left_of(fs)[0]}")}
    assert len([name for name in names if name.endswith("safetensors")]) == 2
    options = {"coordination": "none"} if others == 1 else {}
    with Ranks(fs, others, run="/run", levels=two(), **options) as job:
        job.each(lambda rank: job.ckpts[rank].flush(DEADLINE_S))
        assert {status(each).error for each in job.ckpts} == {None}
    assert files(fs, FAR, 1) == files(fs, NEAR, 1)
    assert not left_of(fs)


# -- for real --------------------------------------------------------------------------------------

VICTIM = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
import torch
import statehold
from support import scripts
from support.faults import SMALL
from support.inside import promoter
from support.levels import settle
from levels.test_resuming import content, levels_at
ckpt = statehold.Checkpointer(sys.argv[1] + "/near", levels=levels_at(Path(sys.argv[1])), **SMALL)
left = [int(sys.argv[2])]
def die():
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
promoter(ckpt).throttle.give_way = die
ckpt.save(1, content(1)).wait("committed", 60)
settle(ckpt)
"""


def levels_at(folder: Path) -> list[Any]:
    return [statehold.Directory(), statehold.Directory(path=folder / "far", name="far")]


def wait_until_free(path: Path) -> None:
    """The kernel closes the files of a killed process's io_uring after the process is gone. Until
    then the file is not free, and a copy does not go on in it."""
    give_up_s = time.monotonic() + DEADLINE_S
    with contextlib.closing(_core.open_fs("threads", 1, 1)) as fs:
        while not fs.can_reuse(str(path)):
            assert time.monotonic() < give_up_s
            time.sleep(0.001)


def test_a_killed_process_has_left_something_to_go_on_from(
    tmp_path: Path, travelled: Travelled
) -> None:
    died = scripts.run(["-c", VICTIM, tmp_path, str(BLOCKS), Path(__file__).parents[1]])
    assert died.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "far").glob("step-*.copy-*.partial")
    wait_until_free(left / DATA)
    with statehold.Checkpointer(tmp_path / "near", levels=levels_at(tmp_path), **SMALL) as ckpt:
        ckpt.flush(DEADLINE_S)
        assert (status(ckpt).newest, status(ckpt).error) == (1, None)
    near, far = (tmp_path / base / "step-000000000001" / DATA for base in ("near", "far"))
    assert near.read_bytes() == far.read_bytes()
    assert travelled.nbytes < near.stat().st_size
    assert [each.name for each in (tmp_path / "far").glob("step-*")] == ["step-000000000001"]


def test_a_level_whose_copy_was_interrupted_gets_the_next_step_at_once() -> None:
    """Though it wants one in an hour: it was owed one."""
    fs = SimFs(seed=1)
    interrupt(fs, 1, 3)
    for step, expected in ((2, [2]), (3, [2])):
        ckpt = opened_on(fs, far={"every": "1h"})
        save(ckpt, step, content(step))
        settle(ckpt)
        end(ckpt, flush=False)
        assert steps_at(fs, FAR) == expected
