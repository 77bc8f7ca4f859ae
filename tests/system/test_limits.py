"""Limits of a process: each is a named error at worst, and the save after it is lifted works."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold import errors
from support.contents import FITS, check_restored, committed, content
from support.faults import DEADLINE_S, SMALL, must, small
from support.inside import inside
from support.victims import Victims

BACKENDS = ["io_uring", "threads"]


@contextmanager
def limited(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def fill_gaps(folder: Path) -> int:
    """Open descriptors until they are dense; returns the lowest free number."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while (fd := os.open(folder, os.O_RDONLY)) < highest:
        pass
    os.close(fd)
    return fd


def few_descriptors(folder: Path, backend: str) -> None:
    with statehold.Checkpointer(folder / "run", keep=1, **small(backend=backend)) as ckpt:
        for newest in (1, 2, 3):
            committed(ckpt, newest, FITS)
        failed = set()
        first = fill_gaps(folder)
        for spare in (0, 1, 2):  # how many more may be open at once
            save = None
            with limited(resource.RLIMIT_NOFILE, first + spare):
                try:
                    save = ckpt.save(newest + 1, content(newest + 1, FITS))
                    save.wait("committed", DEADLINE_S)
                    newest += 1
                except errors.StorageError as error:
                    failed.add(spare)
                    check_emfile(error)
                inside(ckpt).pipeline.drain()
                if spare == 0:
                    with pytest.raises(errors.StorageError) as caught:
                        ckpt.restore(content(0, FITS))
                    check_emfile(caught.value)
            assert save is None or save.done("committed") == (save.error is None)
            check_restored(ckpt, newest, FITS)
            newest += 1
            committed(ckpt, newest, FITS)
            check_restored(ckpt, newest, FITS)
        assert {0} <= failed < {0, 1, 2}


def check_emfile(error: errors.StorageError) -> None:
    assert error.errno == errno.EMFILE
    assert "EMFILE" in str(error)
    assert "ulimit -n" in str(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_descriptors(victims: Victims, tmp_path: Path, backend: str) -> None:
    victims.run(few_descriptors, tmp_path, backend)


def no_descriptor_at_all(folder: Path) -> None:
    """Opening: io_uring needs a descriptor, too, and says so; "auto" does without it."""
    with statehold.Checkpointer(folder / "warm", **SMALL) as warm:  # its descriptors are back then
        warm.steps()
    with limited(resource.RLIMIT_NOFILE, fill_gaps(folder)):
        with pytest.raises(errors.StorageError) as caught:
            statehold.Checkpointer(folder / "run", **small(backend="io_uring")).steps()
        check_emfile(caught.value)
        ckpt = statehold.Checkpointer(folder / "run", **SMALL)
        assert ckpt.backend == "threads"
        with pytest.raises(errors.StorageError) as caught:
            ckpt.save(1, content(1))
        check_emfile(caught.value)
    committed(ckpt, 2)
    check_restored(ckpt, 2)


def test_no_descriptor_at_all(victims: Victims, tmp_path: Path) -> None:
    victims.run(no_descriptor_at_all, tmp_path)


def small_files(folder: Path, backend: str) -> None:
    """RLIMIT_FSIZE; Python ignores SIGXFSZ, so that it is an errno."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    text = {"text": "x" * 200_000, "w": content(0, FITS)["w"]}  # a manifest of 200 kB
    data = 4 * FITS + 4096
    operations = []
    with statehold.Checkpointer(folder / "run", **small(backend=backend)) as ckpt:
        committed(ckpt, 1, FITS)
        for step, most in enumerate([0, 4096, data - 4096], 2):
            with limited(resource.RLIMIT_FSIZE, most):
                operations.append(check_efbig(ckpt, step, content(step, FITS)))
            check_restored(ckpt, 1, FITS)
        with limited(resource.RLIMIT_FSIZE, 100_000):
            operations.append(check_efbig(ckpt, 8, {**text, "w": text["w"][:10]}))
        assert operations == ["cannot allocate"] * 3 + ["cannot write_file"]
        committed(ckpt, 9, FITS)
        check_restored(ckpt, 9, FITS)


def check_efbig(ckpt: statehold.Checkpointer, step: int, state: dict[str, Any]) -> str:
    with pytest.raises(errors.StorageError) as caught:
        ckpt.save(step, state).wait("committed", DEADLINE_S)
    assert caught.value.errno == errno.EFBIG
    assert "ulimit -f" in str(caught.value)
    assert caught.value.facts["still safe"] == "step 1 and older"
    return caught.value.summary


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_files(victims: Victims, tmp_path: Path, backend: str) -> None:
    victims.run(small_files, tmp_path, backend)


def limits_at_levels(folder: Path, memory_path: str, which: int) -> None:
    """Of the saves into memory and of the copies on: no step is lost, and all room comes back."""
    memory = Path(memory_path)
    levels = [
        statehold.Memory(keep=2, path=memory),
        statehold.Directory(keep=2),
        statehold.Directory(folder / "far", name="far", keep=2),
    ]
    with statehold.Checkpointer(folder / "run", levels=levels, **SMALL) as ckpt:
        for newest in (1, 2, 3):
            committed(ckpt, newest, FITS)
            ckpt.flush(DEADLINE_S)
        first, most = 0, [0, 4 * FITS]  # then saves pass, and copies fail
        if which == resource.RLIMIT_NOFILE:
            first, most = fill_gaps(folder), [0, 1, 2]
        open_before, failed = len(os.listdir("/proc/self/fd")), set()
        for more in most:
            with limited(which, first + more):
                try:
                    ckpt.save(newest + 1, content(newest + 1, FITS)).wait("committed", DEADLINE_S)
                    newest += 1
                except errors.StorageError as error:
                    must("(ulimit" in str(error), error)
                    failed.add(more)
                inside(ckpt).pipeline.drain()
                ckpt.flush(DEADLINE_S)
            check_restored(ckpt, newest, FITS)
            newest += 2
            committed(ckpt, newest, FITS)
            ckpt.flush(DEADLINE_S)
            assert [(each.newest, each.error) for each in ckpt.levels()] == [(newest, None)] * 3
            assert len(os.listdir("/proc/self/fd")) == open_before
            assert not [*memory.glob("*.partial"), *folder.glob("*/*.partial")]
        assert {0} <= failed < {*most}


@pytest.mark.parametrize("which", [resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE])
def test_limits_at_levels(victims: Victims, tmp_path: Path, memory: Path, which: int) -> None:
    victims.run(limits_at_levels, tmp_path, str(memory), which)


def little_address_space(folder: Path) -> None:
    """Where the staging memory does not fit, or the stack of a thread does not."""
    with statehold.Checkpointer(folder / "run", **SMALL) as ckpt:
        committed(ckpt, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    seen = []
    for room in (512 << 20, 4 << 20, 9 << 20):
        with limited(resource.RLIMIT_AS, used + room):
            options = {**SMALL, "staging_bytes": "1GiB"} if room > 64 << 20 else SMALL
            with pytest.raises(errors.StorageError) as caught:
                statehold.Checkpointer(folder / "run", **options).save(2, content(2))
            assert caught.value.errno in (errno.ENOMEM, errno.EAGAIN)
            seen.append(caught.value.summary)
    assert seen[0] == "cannot map the staging memory"
    with statehold.Checkpointer(folder / "run", **SMALL) as ckpt:
        check_restored(ckpt, 1)
        committed(ckpt, 2)
        check_restored(ckpt, 2)


def test_little_address_space(victims: Victims, tmp_path: Path) -> None:
    victims.run(little_address_space, tmp_path)
