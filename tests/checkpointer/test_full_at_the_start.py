"""A job that finds more steps than stay retires them before its first save writes a byte, because a
full disk takes no step that retires others. What it may go back to stays until a newer commit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import statehold
from sim.seeds import used_bytes
from statehold import Keep
from statehold.errors import NoSpaceError, StorageError
from support.faults import DEADLINE_S, SMALL, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.levels import FAR, opened_on, save, settle, steps_at
from support.ranks import RUN, Ranks

BIG, STEPS = 1 << 16, range(1, 6)
DATA = "rank-00000-of-00001.safetensors"


def content(step: int) -> dict[str, Any]:
    return {"w": torch.arange(BIG) + step}


def full(fs: SimFs) -> SimFs:
    """No step has room from now on, unless another one goes."""
    fs.set_faults(capacity=used_bytes(fs, "") + BIG)
    return fs


def left(ranks: int = 1) -> SimFs:
    """A disk with the steps of a job that keeps all of them. So does one that was killed before R1,
    for one step."""
    fs = SimFs(seed=1)
    with Ranks(fs, ranks) as job:
        for step in STEPS:
            job.save(step, lambda _, step=step: content(step))
    return fs


@pytest.mark.parametrize(
    ("before", "ranks", "keep"),
    [*((n, n, keep) for n in (1, 2) for keep in (1, 2, 4)), (1, 2, 2), (2, 3, 2), (3, 2, 4)],
)
def test_the_first_save_of_a_job_makes_room_for_itself(before: int, ranks: int, keep: int) -> None:
    """With another number of ranks than before, no file is held back that no rank overwrites."""
    fs = full(left(before))
    with Ranks(fs, ranks, keep=keep) as job:
        job.each(lambda rank: job.ckpts[rank].restore(content(0)))
        for step in (6, 7, 8):
            job.save(step, lambda _, step=step: content(step))
            job.each(lambda rank: inside(job.ckpts[rank]).pipeline.drain())
            assert steps_at(fs, RUN) == list(range(step + 1 - keep, step + 1))


@pytest.mark.parametrize(
    ("restored", "keep", "stay"),
    [
        (None, 1, [5]),
        (5, 2, [4, 5]),
        (2, 1, [2, 5]),
        (None, Keep(last=1, every=3, pinned=[1]), [1, 3, 5]),
    ],
)
def test_what_stays_until_the_first_commit(
    restored: int | None, keep: int | Keep, stay: list[int]
) -> None:
    fs = left()
    with checkpointer_on(fs, RUN, keep=keep, **SMALL) as ckpt:
        if restored is not None:
            ckpt.restore(content(0), restored)
        assert steps_at(fs, RUN) == list(STEPS)  # a job that saves nothing retires nothing
        fs.set_faults(capacity=0)
        with pytest.raises(NoSpaceError):
            save(ckpt, 6, content(6))
        assert steps_at(fs, RUN) == stay


@pytest.mark.filterwarnings("ignore:step 5 is damaged:RuntimeWarning")
@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_the_newest_step_that_is_whole_stays(damage: str, restores: bool) -> None:
    fs, path = left(), f"{RUN}/step-{STEPS[-1]:012d}/{DATA}"
    if damage == "cut":
        fs.unlink(path)
    else:
        fs.corrupt(path, 10_000, 0x10)
    with checkpointer_on(fs, RUN, keep=1, **SMALL) as ckpt:
        if restores:  # which sets the damaged step aside, for which it locks the run
            got = ckpt.restore(content(0))
            assert got == 4
        fs.set_faults(capacity=0)
        with pytest.raises(NoSpaceError):
            save(ckpt, 6, content(6))
        fs.set_faults()
        if restores or damage == "cut":  # whose bytes are damaged, only a restore finds out
            live = content(0)
            got = ckpt.restore(live)
            assert got == 4
            assert torch.equal(live["w"], content(4)["w"])


def test_a_rewind_retires_nothing_else() -> None:
    fs = left()
    with checkpointer_on(fs, RUN, keep=1, **SMALL) as ckpt:
        assert ckpt.rewind(3) == [4, 5]
        assert steps_at(full(fs), RUN) == [1, 2, 3]
        save(ckpt, 4, content(4))


def test_a_retention_that_failed_is_repeated_before_the_next_save_writes() -> None:
    fs, refused = SimFs(seed=1), list[str]()

    def refuse(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "rename" and args[1].endswith(".retired") and len(refused) < 3:
            refused.append(args[0])
            raise StorageError("cannot rename", errno=5, path=args[0])

    with checkpointer_on(fs, RUN, keep=1, **SMALL) as ckpt:
        save(ckpt, 1, content(1))
        spy_on(ckpt, refuse)
        save(ckpt, 2, content(2))
        inside(ckpt).pipeline.drain()
        full(fs)
        for step in (3, 4):  # refused again
            with pytest.raises(NoSpaceError):
                save(ckpt, step, content(step))
        assert len(refused) == 3
        assert steps_at(fs, RUN) == [1, 2]
        save(ckpt, 5, content(5))
        inside(ckpt).pipeline.drain()
        assert steps_at(fs, RUN) == [5]


def test_a_level_makes_room_for_the_first_copy_of_a_job() -> None:
    fs = SimFs(seed=1)
    for keep, first in ((9, 1), (2, 6)):
        with opened_on(fs, near={"keep": 1}, far={"every": 1, "keep": keep}) as ckpt:
            ckpt.restore(content(0))
            for step in range(first, first + 5):
                save(ckpt, step, content(step))
                settle(ckpt)
            assert steps_at(fs, FAR) == list(range(max(1, step + 1 - keep), step + 1))
        fs.set_faults(capacity=used_bytes(fs, "") + 12 * BIG)  # the near level has room


def test_a_level_of_each_host_makes_room_too(tmp_path) -> None:
    (tmp_path / "near").mkdir()
    near = tmp_path / "near" / "steps"
    for keep in (5, 2):
        levels = [
            statehold.Directory(path=near, per_host=True, keep=keep, name="near"),
            statehold.Directory(path=tmp_path / "far", name="far"),
        ]
        with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
            step = (ckpt.restore(content(0)) or 0) + 1
            seen = list[int]()

            def look(operation: str, _: tuple[Any, ...], seen: list[int] = seen) -> None:
                if operation == "open_write":
                    seen[:] = seen or [path.name[-1] for path in near.glob("step-*[0-9]")]

            spy_on(ckpt, look)
            for each in range(step, step + 5):
                ckpt.save(each, content(each)).wait("committed", DEADLINE_S)
                settle(ckpt)
    assert sorted(seen) == ["4", "5"]
