"""A real ext4 that is full at different moments of a save, out of inodes, or read-only."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

import statehold
from statehold import errors
from support.contents import FITS, check_restored, committed, content
from support.faults import DEADLINE_S, SMALL
from support.mounts import ext4, few_inodes, nearly_full, why_no_ext4

pytestmark = pytest.mark.skipif(why_no_ext4() is not None, reason=str(why_no_ext4()))

PAGE = 4096
DATA = 4 * FITS // PAGE + 2  # pages of a data file, about
# Free pages: none for the directory, none for the data, for part of it, for all but the manifest.
FREE = [0, 1, 2, DATA // 2, *range(DATA - 2, DATA + 6)]


def failed_operation(ckpt: statehold.Checkpointer, step: int) -> str | None:
    """What had no space left; None if the step was committed."""
    save = None
    try:
        save = ckpt.save(step, content(step, FITS))
        save.wait("committed", DEADLINE_S)
    except errors.NoSpaceError as error:
        failed = error
    else:
        failed = None
    ckpt._opened().pipeline.drain()
    if failed is None:
        return None
    assert failed.errno == errno.ENOSPC
    assert "inodes" in str(failed)
    assert save is None or not save.done("committed")
    return failed.summary


@pytest.mark.parametrize("reuse", [True, False])
def test_it_fills_up_at_every_moment_of_a_save(tmp_path: Path, reuse: bool) -> None:
    seen = set()
    with ext4(tmp_path, 16 << 20) as root:
        run = root / "run"
        with statehold.Checkpointer(run, keep=1, reuse_files=reuse, **SMALL) as ckpt:
            for newest in (1, 2, 3):
                committed(ckpt, newest, FITS)
            for free in FREE:
                with nearly_full(root, free * PAGE):
                    failed = failed_operation(ckpt, newest + 1)
                    newest += failed is None
                    check_restored(ckpt, newest, FITS)
                seen.add(failed)
                for _ in range(3):
                    newest += 1
                    committed(ckpt, newest, FITS)
                check_restored(ckpt, newest, FITS)
        assert sorted(path.name for path in run.iterdir()) == [".lock", f"step-{newest:012d}"]
    assert {None, "cannot mkdir"} <= seen
    assert "cannot allocate" in seen or reuse


def test_it_runs_out_of_inodes(tmp_path: Path) -> None:
    seen = []
    with ext4(tmp_path, 16 << 20, "-N", "64") as root:
        with statehold.Checkpointer(root / "run", keep=1, reuse_files=False, **SMALL) as ckpt:
            committed(ckpt, 1, FITS)
            for free in range(4):
                with few_inodes(root, free):
                    seen.append(failed_operation(ckpt, 2 + 2 * free))
                    check_restored(ckpt, ckpt.steps()[-1], FITS)
                committed(ckpt, 3 + 2 * free, FITS)
        with statehold.Checkpointer(root / "run", **SMALL) as ckpt:
            check_restored(ckpt, 9, FITS)
    assert seen == ["cannot mkdir", "cannot open_write", "cannot write_file", None]


def test_it_is_read_only(tmp_path: Path) -> None:
    with ext4(tmp_path, 16 << 20) as root:
        run = root / "run"
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            committed(ckpt, 1, FITS)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        for folder in (run, root / "new"):
            with statehold.Checkpointer(folder, **SMALL) as ckpt:
                if folder == run:
                    check_restored(ckpt, 1, FITS)
                with pytest.raises(errors.StorageError) as caught:
                    ckpt.save(2, content(2, FITS))
                assert caught.value.errno == errno.EROFS
                assert "may be written" in str(caught.value)
        subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            committed(ckpt, 2, FITS)
            check_restored(ckpt, 2, FITS)
