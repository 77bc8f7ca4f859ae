"""A real ext4 that is full at different moments of a save, out of inodes, or read-only."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import statehold
from statehold import errors
from support.contents import FITS, check_restored, committed, content
from support.faults import DEADLINE_S, SMALL, small
from support.inside import inside, trainer
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
    inside(ckpt).pipeline.drain()
    if failed is None:
        return None
    assert failed.errno == errno.ENOSPC
    assert "inodes" in str(failed)
    assert save is None or not save.done("committed")
    return failed.summary


@pytest.mark.thorough
@pytest.mark.parametrize("reuse", [True, False])
def test_it_fills_up_at_every_moment_of_a_save(tmp_path: Path, reuse: bool) -> None:
    seen = set()
    with ext4(tmp_path, 16 << 20) as root:
        run = root / "run"
        with statehold.Checkpointer(run, keep=1, **small(reuse_files=reuse)) as ckpt:
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
        with statehold.Checkpointer(root / "run", keep=1, **small(reuse_files=False)) as ckpt:
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
                assert "a writable directory" in str(caught.value)
        subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            committed(ckpt, 2, FITS)
            check_restored(ckpt, 2, FITS)


def free_bytes(root: Path) -> int:
    room = os.statvfs(root)
    return room.f_bfree * room.f_frsize


def has_again(root: Path, nbytes: int) -> bool:
    """Whether so many bytes become free. A write in flight holds the file for milliseconds more."""
    give_up_s = time.monotonic() + DEADLINE_S
    while free_bytes(root) < nbytes and time.monotonic() < give_up_s:
        time.sleep(0.001)
    return free_bytes(root) >= nbytes


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.thorough
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", ["ext2", "ext4"])
@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_failed_save_gives_its_room_back_at_once(tmp_path: Path, backend: str, kind: str) -> None:
    """Without waiting for the cyclic collector, though its handle and its error are kept. An ext2
    has no fallocate: there it is a write that fails."""
    kept: list[object] = []
    small, big = content(1, 1 << 18), content(1, 3 << 20)
    io = statehold.Io(buffer_bytes=1 << 20, backend=backend)
    options = {"keep": 1, "staging_bytes": 32 << 20, "io": io}
    with ext4(tmp_path, 32 << 20, kind=kind) as root:
        ckpt = statehold.Checkpointer(root / "run", **options)
        ckpt.save(1, small).wait("committed", DEADLINE_S)
        inside(ckpt).pipeline.drain(DEADLINE_S)
        with nearly_full(root, 4 << 20) if kind == "ext4" else filled(root, 4 << 20):
            for step in (2, 4, 6):
                ckpt.save(step, small).wait("committed", DEADLINE_S)
                inside(ckpt).pipeline.drain(DEADLINE_S)
                before = free_bytes(root)
                with pytest.raises(errors.NoSpaceError) as caught:
                    ckpt.save(step + 1, big).wait("committed", DEADLINE_S)
                kept += [*trainer(ckpt).watched, caught.value, caught.value.__traceback__]
                inside(ckpt).pipeline.drain()
                assert has_again(root, before)
        ckpt.close()
    assert len(kept) >= 6  # until the file system was unmounted


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", ["ext2", "ext4"])
def test_a_shared_file_without_room_takes_none(tmp_path: Path, kind: str) -> None:
    """What is left of it would keep the disk full for all who use it."""
    little, base = content(1, 1 << 18), torch.nn.Linear(1 << 10, 3 << 10)
    base.requires_grad_(False)
    options = {"keep": 1, "staging_bytes": 32 << 20, "io": statehold.Io(buffer_bytes=1 << 20)}
    with ext4(tmp_path, 32 << 20, kind=kind) as root:
        ckpt = statehold.Checkpointer(root / "run", **options)
        ckpt.save(1, little).wait("committed", DEADLINE_S)
        inside(ckpt).pipeline.drain(DEADLINE_S)
        with nearly_full(root, 4 << 20) if kind == "ext4" else filled(root, 4 << 20):
            for step in (2, 4):
                before = free_bytes(root)
                with pytest.raises(errors.NoSpaceError) as caught:
                    ckpt.save(step, {**little, "base": base}).wait("committed", DEADLINE_S)
                assert kind == "ext2" or ".shared" in caught.value.path  # there either may be first
                inside(ckpt).pipeline.drain()
                assert has_again(root, before - PAGE)  # the empty directory
                ckpt.save(step + 1, little).wait("committed", DEADLINE_S)
                inside(ckpt).pipeline.drain(DEADLINE_S)
        ckpt.close()


@contextmanager
def filled(root: Path, free: int) -> Iterator[None]:
    """As nearly_full, where nothing can be allocated without being written."""
    ballast = root / "ballast"
    with ballast.open("wb") as file:
        while free_bytes(root) > free:
            file.write(bytes(min(1 << 20, free_bytes(root) - free)))
            file.flush()
            os.fsync(file.fileno())
    try:
        yield
    finally:
        ballast.unlink()
