"""A step is saved again on a file system that cannot exchange two names.

Which crash leaves what: sim/test_crash_states.py. Here: errors, readers beside the writer and after
its death, and a real file system.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import errors
from statehold.checkpoint.levels.hosts.serving import Served
from statehold.cli import main
from statehold.steps.directories import delete
from statehold.steps.nearest import Nearest
from statehold.steps.store import Store
from support.faults import DEADLINE_S, SMALL, Spy, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside

DATA = "rank-00000-of-00001.safetensors"
STEP = "/run/step-000000000002"
ASIDE = f"{STEP}.replaced"


def content(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), value, dtype=torch.uint8)}


def saved(fs: SimFs, *saves: tuple[int, int], keep: int = 2) -> None:
    with checkpointer_on(fs, "/run", keep=keep, **SMALL) as ckpt:
        for step, value in saves:
            ckpt.save(step, content(value)).wait("committed", DEADLINE_S)


def restored(fs: SimFs, step: int | None = None) -> tuple[int | None, int]:
    live = content(0)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        got = ckpt.restore(live, step)
    return got, int(live["w"][0])


def names(fs: SimFs) -> list[str]:
    return [name for name, _ in fs.listdir("/run") if name.startswith("step-")]


@pytest.fixture(autouse=True)
def _strict() -> None:
    warnings.simplefilter("error", RuntimeWarning)


@pytest.fixture
def fs() -> SimFs:
    fs = SimFs(seed=1)
    saved(fs, (1, 1), (2, 2))
    fs.fail_next("exchange", errno.EINVAL, 1 << 30, 0)
    return fs


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTEMPTY, errno.EEXIST]
)
def test_a_step_is_saved_again(fs: SimFs, code: int) -> None:
    fs.set_faults(1)
    fs.fail_next("exchange", code, 1 << 30, 0)
    saved(fs, (2, 22), (2, 23))
    assert fs.fired["injected exchange"] == 2
    assert restored(fs) == (2, 23)
    assert names(fs) == ["step-000000000001", "step-000000000002"]


def test_an_exchange_that_renames_over_the_old_step_is_a_commit(fs: SimFs) -> None:
    """A file system that ignores RENAME_EXCHANGE, and the rule about directories that are full."""
    fs.set_faults(1)

    class Renaming(Spy):
        def exchange(self, partial: str, final: str) -> None:
            delete(fs, final)
            fs.rename(partial, final)

    with checkpointer_on(fs, "/run", keep=2, **SMALL) as ckpt:
        inside(ckpt).levels.store.fs = Renaming(fs, lambda *_: None)
        ckpt.save(2, content(22)).wait("committed", DEADLINE_S)
    assert restored(fs) == (2, 22)
    assert names(fs) == ["step-000000000001", "step-000000000002"]


def test_an_error_that_is_no_refusal_is_raised(fs: SimFs) -> None:
    fs.set_faults(1)
    fs.fail_next("exchange", errno.EIO)
    with pytest.raises(errors.StorageError, match="EIO"):
        saved(fs, (2, 22))
    assert restored(fs) == (2, 2)
    assert names(fs) == ["step-000000000001", "step-000000000002"]


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("skip", [0, 1])
def test_after_an_error_the_old_one_is_there(fs: SimFs, skip: int, failures: int) -> None:
    """E1 (skip 0) or D6 (skip 1) fails, and with two failures also what puts the old one back."""
    fs.fail_next("rename", errno.EIO, failures, skip)
    with pytest.raises(errors.StorageError, match="EIO"):
        saved(fs, (2, 22), keep=3)
    assert fs.fired["injected rename"] >= 1
    fs.set_faults(1)
    fs.fail_next("exchange", errno.EINVAL, 1 << 30, 0)
    assert restored(fs) == (2, 2)
    saved(fs, (2, 23), keep=3)
    assert restored(fs) == (2, 23)
    assert names(fs) == ["step-000000000001", "step-000000000002"]


def test_a_later_save_of_the_same_job_copes_with_what_failed(fs: SimFs) -> None:
    with checkpointer_on(fs, "/run", keep=1, **SMALL) as ckpt:
        # After R1 and R3 of step 1, and E1: D6, and what puts the old one back.
        fs.fail_next("rename", errno.EIO, 2, 4)
        with pytest.raises(errors.StorageError, match="EIO"):
            ckpt.save(2, content(22)).wait("committed", DEADLINE_S)
        assert ASIDE.removeprefix("/run/") in names(fs)
        assert ckpt.steps() == [2]
        ckpt.save(3, content(3)).wait("committed", DEADLINE_S)
    assert names(fs) == ["step-000000000003"]  # 2 was retired from where it was


def test_what_was_replaced_never_comes_back(fs: SimFs) -> None:
    """E3 fails: the old save is still at the other name when the new one is retired."""
    with checkpointer_on(fs, "/run", keep=2, **SMALL) as ckpt:
        fs.fail_next("rename", errno.EIO, 1, 2)  # E3
        ckpt.save(2, content(22)).wait("committed", DEADLINE_S)
        assert fs.fired["injected rename"] == 1
        assert ASIDE.removeprefix("/run/") in names(fs)
        assert restored(fs) == (2, 22)
        ckpt.rewind(1)
        assert ckpt.steps() == [1]
    assert names(fs) == ["step-000000000001"]


def save_until(fs: SimFs, nth: int) -> None:
    """Save step 2 again in a job that ends before its `nth` rename: nothing it does has an effect
    from then on."""
    renames = 0

    def before(operation: str, _args: tuple[Any, ...]) -> None:
        nonlocal renames
        renames += operation == "rename"
        if renames >= nth:
            raise errors.StorageError("off", errno=errno.EIO)

    with checkpointer_on(fs, "/run", keep=2, **SMALL) as ckpt:
        spy_on(ckpt, before)
        with contextlib.suppress(errors.StorageError):
            ckpt.save(2, content(22)).wait("committed", DEADLINE_S)
    assert renames >= nth


def test_a_reader_that_may_not_write_finds_the_step_before_any_recovery(fs: SimFs) -> None:
    save_until(fs, 2)  # D6
    assert names(fs)[-2:] == ["step-000000000002.partial", "step-000000000002.replaced"]
    for operation in ("rename", "mkdir", "sync_dir", "unlink"):
        fs.fail_next(operation, errno.EROFS, 1 << 30, 0)
    assert restored(fs) == (2, 2)
    assert restored(fs, 2) == (2, 2)
    assert not any(fs.fired.get(f"injected {each}") for each in ("rename", "mkdir", "unlink"))


def test_the_next_job_puts_it_back(fs: SimFs) -> None:
    save_until(fs, 2)
    saved(fs, (3, 3))
    assert names(fs) == ["step-000000000002", "step-000000000003"]
    assert restored(fs, 2) == (2, 2)


def test_the_next_job_removes_what_the_new_one_has_replaced(fs: SimFs) -> None:
    save_until(fs, 3)  # E3
    assert ASIDE.removeprefix("/run/") in names(fs)
    saved(fs, (3, 3))
    assert names(fs) == ["step-000000000002", "step-000000000003"]
    assert restored(fs, 2) == (2, 22)


# -- readers beside the writer ---------------------------------------------------------------------


def moved(fs: SimFs) -> None:
    fs.rename(STEP, ASIDE)


def back(fs: SimFs) -> None:
    fs.rename(ASIDE, STEP)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("changes", [(moved,), (moved, back), (moved, back, moved)])
def test_a_reader_between_the_two_renames_looks_again(
    fs: SimFs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: tuple[Callable[[SimFs], None], ...],
    late: bool,
) -> None:
    """Before or after a path was found for each of its files, the step gets its other name."""
    left = list(changes)
    find = Nearest.find

    def beside(*arguments: Any) -> str:
        if left and not late:
            left.pop(0)(fs)
        path = find(*arguments)
        if left and late:
            left.pop(0)(fs)
        return path

    monkeypatch.setattr(Nearest, "find", beside)
    assert restored(fs) == (2, 2)
    assert len(left) < len(changes)
    assert "damaged" not in caplog.text
    assert "not intact" not in caplog.text


def test_a_file_that_is_really_missing_is_damage(fs: SimFs) -> None:
    fs.unlink(f"{STEP}/{DATA}")
    with (
        checkpointer_on(fs, "/run", **SMALL) as ckpt,
        pytest.raises(errors.MissingFileError),
    ):
        ckpt.restore(content(0), 2)


def test_other_hosts_and_commands_find_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(2, content(2)).wait("committed", DEADLINE_S)
    step = tmp_path / "run" / "step-000000000002"
    aside = step.rename(step.with_name(step.name + ".replaced"))
    with Served({"near": str(tmp_path / "run")}).open(f"near/{step.name}/{DATA}") as (_, nbytes):
        assert nbytes == (aside / DATA).stat().st_size
    for command in ("ls", "show", "verify"):
        assert main([command, str(tmp_path / "run")]) == 0
        assert "OTHER" not in capsys.readouterr().out  # what lies beside the steps
    assert main(["verify", f"{tmp_path / 'run'}@2"]) == 0
    assert "DAMAGED" not in capsys.readouterr().out


def test_a_store_lists_a_step_once(fs: SimFs) -> None:
    store = Store(fs, "/run")
    fs.mkdir(ASIDE)
    assert store.steps() == [1, 2]
    assert store.where(2) == STEP
