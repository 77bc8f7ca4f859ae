"""Steps share the files of what has not changed, and each step is what was saved."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from statehold import Checkpointer, Directory, Memory
from statehold.errors import NoSpaceError, StateholdError, StorageError
from statehold.tensors import columns
from support.faults import DEADLINE_S, SMALL, Spy, small
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.levels import FAR, LATER, NEAR, opened_on, settle, steps_at
from support.sharing import Tuned, TunedRun, names, same, whole_steps

RUN = "/runs/x"
POOL = f"{RUN}/.shared"
pytestmark = pytest.mark.usefixtures("small_shared_files")


def opened(fs: SimFs, **options: Any) -> Checkpointer:
    return checkpointer_on(fs, RUN, **{**SMALL, **options})


class Run(TunedRun):
    def __init__(self, fs: SimFs, model: Tuned, *, is_loose: bool = False, **options: Any) -> None:
        super().__init__(opened(fs, **options), model, is_loose=is_loose)

    def check(self, fs: SimFs) -> None:
        """Every step that is there restores bit for bit, by a new process."""
        reader = opened(fs)
        assert whole_steps(reader, self.expected, is_loose=self.is_loose)
        reader.close()


def test_what_needs_no_gradient_is_written_once(fs: SimFs) -> None:
    run = Run(fs, Tuned())
    first = run.save(1)
    assert first.stats.written_bytes > run.model.base_bytes
    for step in (2, 3, 4):
        stats = run.save(step).stats
        assert stats.linked_bytes > run.model.base_bytes
        assert stats.written_bytes < run.model.head.nbytes + 8192
        assert stats.files == first.stats.files > 1
    run.ckpt.close()
    run.check(fs)


def test_what_stays_the_same_is_shared_whatever_it_is(fs: SimFs) -> None:
    model = Tuned()
    for each in model.base:
        each.requires_grad_(True)  # and yet nobody trains it
    run = Run(fs, model)
    linked = [run.save(step).stats.linked_bytes for step in range(1, 6)]
    assert linked[:3] == [0, 0, 0]  # written, compared, written to files of their own
    assert all(each > model.base_bytes for each in linked[3:])
    run.ckpt.close()
    run.check(fs)


def test_so_is_what_a_state_dict_has(fs: SimFs) -> None:
    run = Run(fs, Tuned(), is_loose=True)
    linked = [run.save(step).stats.linked_bytes for step in range(1, 6)]
    assert linked[:3] == [0, 0, 0]
    assert all(each > run.model.base_bytes for each in linked[3:])
    run.ckpt.close()
    run.check(fs)


def test_so_is_what_new_tensors_have_whatever_tensors_were_there_before(
    fs: SimFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind a tensor may get the address of one that is gone. Here all get the same."""
    monkeypatch.setattr(columns, "_impl", lambda tensor: 4096)
    ckpt, model = opened(fs), Tuned()
    memory, linked = [], []
    for step in range(1, 6):
        state = model.bits()
        memory.append([each.untyped_storage() for each in state.values()])  # nobody else gets it
        save = ckpt.save(step, state).wait("committed", DEADLINE_S)
        inside(ckpt).pipeline.drain(DEADLINE_S)
        del state
        linked.append(save.stats.linked_bytes)
    ckpt.close()
    assert linked[:3] == [0, 0, 0]
    assert all(each > model.base_bytes for each in linked[3:])


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [4, 200])  # 64 KiB, or 3 MiB: more than all staging memory
def test_a_state_dict_may_change_as_soon_as_save_has_returned(fs: SimFs, layers: int) -> None:
    run = Run(fs, Tuned(layers), is_loose=True, keep=2)
    linked = []
    for step in range(1, 20):
        linked.append(run.save(step, wait=False))
        if step % 6 == 0:
            with torch.no_grad():
                for each in run.model.base[:: step // 6]:
                    each.add_(1.0)
        linked[-1].wait("committed", DEADLINE_S)
        inside(run.ckpt).pipeline.drain(DEADLINE_S)
    run.ckpt.close()
    assert sum(save.stats.linked_bytes > 0 for save in linked) > 3
    run.check(fs)


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_steps_are_whole_when_the_base_changes_after_all(fs: SimFs, keep: int | None) -> None:
    run = Run(fs, Tuned(), keep=keep)
    linked = []
    for step in range(1, 12):
        if step in (4, 7, 8):
            with torch.no_grad():
                run.model.base[step % 4].mul_(1.5)
        linked.append(run.save(step).stats.linked_bytes)
    assert 0 < linked[3] < linked[2]
    run.ckpt.close()
    run.check(fs)


def test_a_change_that_nothing_counts_is_found(fs: SimFs) -> None:
    run = Run(fs, Tuned())
    run.save(1)
    whole = run.save(2).stats
    run.model.base[1].detach().numpy()[5, 5] += 1.0  # moves no version counter
    stats = run.save(3).stats
    assert 0 < stats.linked_bytes < whole.linked_bytes
    assert stats.written_bytes > whole.written_bytes
    for step in (4, 5):
        run.save(step)
    run.ckpt.close()
    run.check(fs)


def test_a_level_in_memory_shares_files(memory: Path, tmp_path: Path) -> None:
    """Its files are there before a save asks for them, but for those that are shared."""
    model = Tuned()
    levels: list[Any] = [Memory(path=memory, keep=2), Directory(every=4)]
    expected, linked = {}, []
    with Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        for step in range(1, 17):
            if step in (6, 11):
                model.base[step % 4].detach().numpy()[5, 5] += 1.0
            model.train_once()
            expected[step] = model.bits()
            save = ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain(DEADLINE_S)
            linked.append(save.stats.linked_bytes)
        for step in ckpt.steps():
            found = Tuned()
            ckpt.restore({"model": found}, step)
            assert same(found.bits(), expected[step])
    assert 0 < linked[5] < linked[4]
    assert linked[-1] >= linked[4]


def test_it_can_be_switched_off(fs: SimFs) -> None:
    run = Run(fs, Tuned(), **small(share_files=False))
    for step in (1, 2, 3):
        stats = run.save(step).stats
        assert stats.linked_bytes == 0
        assert stats.files == 1
    run.ckpt.close()
    run.check(fs)


def test_two_saves_at_once_share_files_and_keep_one_step(fs: SimFs) -> None:
    run = Run(fs, Tuned(), keep=1)
    for step in range(1, 9):
        run.save(step, wait=False)
    run.ckpt.close()
    run.check(fs)


def test_nothing_is_left_in_the_pool(fs: SimFs) -> None:
    run = Run(fs, Tuned(), keep=2)
    for step in range(1, 6):
        run.save(step)
    before = len(names(fs, POOL))
    with torch.no_grad():
        for each in run.model.base:
            each.add_(1.0)
    run.save(6)
    assert before > 0 == len(names(fs, POOL))
    run.ckpt.close()
    assert POOL.rpartition("/")[2] not in names(fs, RUN)


def test_a_level_that_refuses_a_save_keeps_none_of_its_new_files(fs: SimFs) -> None:
    """It has room for the first shared file of each save and not for the second."""
    model, opened = Tuned(), 0

    def before(operation: str, args: tuple[Any, ...]) -> None:
        nonlocal opened
        if operation == "open_write" and f"{NEAR}/.shared/" in str(args[0]):
            opened += 1
            if opened % 2 == 0:
                raise NoSpaceError("no space", errno=errno.ENOSPC, path=str(args[0]))

    with opened_on(fs, far=LATER) as ckpt:
        store = inside(ckpt).levels.store
        store.fs = Spy(store.fs, before)
        for step in range(1, 4):
            model.train_once()
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
            settle(ckpt)
            assert names(fs, f"{NEAR}/.shared") == []
        assert opened == 6
        assert steps_at(fs, FAR) == [1, 2, 3]


def test_a_lock_that_somebody_removes_costs_no_name_of_this_job(fs: SimFs) -> None:
    run = Run(fs, Tuned())
    run.save(1)
    held = names(fs, POOL)
    fs.write_file(f"{POOL}/dead-rank-00000-1.safetensors", b"left")
    inside(run.ckpt).levels.store.recover()
    assert names(fs, POOL) == held
    assert run.save(2).stats.linked_bytes > 0
    run.ckpt.close()
    run.check(fs)


def test_names_of_a_dead_job_are_cleared(fs: SimFs) -> None:
    run = Run(fs, Tuned())
    run.save(1)
    fs.write_file(f"{POOL}/dead-rank-00000-1.safetensors", b"left")
    assert len(names(fs, POOL)) > 1
    run.ckpt.close()
    again = Run(fs, Tuned())
    again.save(2)
    assert "dead-rank-00000-1.safetensors" not in names(fs, POOL)
    again.ckpt.close()


def test_a_lost_name_fails_one_save_and_no_other(fs: SimFs) -> None:
    run = Run(fs, Tuned())
    run.save(1)
    for name in names(fs, POOL):
        fs.unlink(f"{POOL}/{name}")
    with pytest.raises(StorageError) as caught:
        run.save(2)
    assert caught.value.errno == errno.ENOENT
    del run.expected[2]
    inside(run.ckpt).pipeline.drain(DEADLINE_S)
    assert run.save(3).stats.linked_bytes == 0
    assert run.save(4).stats.linked_bytes > 0
    run.ckpt.close()
    run.check(fs)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_file_system_without_links_gets_copies_once(
    fs: SimFs, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(fs, Tuned())
    fs.fail_next("link", code, 1 << 20)
    for step in range(1, 5):
        stats = run.save(step).stats
        assert stats.linked_bytes == 0
    assert fs.fired["injected link"] > 0
    fs.set_faults()
    run.ckpt.close()
    run.check(fs)
    assert caplog.text.count("share no files") == 1


def test_a_file_with_as_many_names_as_it_can_get_is_written_again(
    fs: SimFs, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(fs, Tuned())
    run.save(1)
    assert run.save(2).stats.linked_bytes > 0
    fs.fail_next("link", errno.EMLINK, 1 << 20)
    assert run.save(3).stats.linked_bytes == 0  # the step has copies
    fs.set_faults()
    assert run.save(4).stats.written_bytes > run.model.base_bytes  # files of their own, once more
    assert run.save(5).stats.linked_bytes > run.model.base_bytes
    run.ckpt.close()
    run.check(fs)
    assert "share no files" not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("operation", ["open_write", "sync", "link", "sync_dir", "rename"])
@pytest.mark.parametrize("skip", range(4))
def test_after_a_failure_the_next_save_is_whole(fs: SimFs, operation: str, skip: int) -> None:
    run = Run(fs, Tuned(), keep=2)
    run.save(1)
    run.save(2)
    fs.fail_next(operation, errno.EIO, 1, skip)
    for step in range(3, 7):
        try:
            run.save(step)
        except StateholdError:
            del run.expected[step]
            inside(run.ckpt).pipeline.drain(DEADLINE_S)
    assert fs.fired[f"injected {operation}"] == 1
    run.save(7)
    assert run.save(8).stats.linked_bytes > 0
    run.ckpt.close()
    run.check(fs)


def test_a_job_that_goes_on_saves_whole_steps_of_a_state_dict(fs: SimFs) -> None:
    """A shared file has the step in its header at which the earlier job wrote it."""
    first = Run(fs, Tuned(), is_loose=True)
    for step in range(1, 6):
        first.save(step)
    first.ckpt.close()
    again = Run(fs, Tuned(), is_loose=True)
    assert again.ckpt.restore({"model": again.model.state_dict()}) == 5
    again.model, again.expected = first.model, first.expected
    for step in range(6, 9):
        again.save(step)
    again.ckpt.close()
    again.check(fs)
