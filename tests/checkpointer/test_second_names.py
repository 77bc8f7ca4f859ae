"""A file that has a second name is never written again, wherever files are used again.

Each test has a control: the same file with one name is used again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import _core
from statehold.steps.store import Store
from statehold.steps.target import Unfinished, copy_attempt
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs
from support.inside import inside

DATA, BYTES = "rank-00000-of-00001.safetensors", 8192
LINKED = pytest.mark.parametrize("is_linked", [False, True], ids=["one name", "two names"])


@pytest.fixture(params=["threads", "sim"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    fs = SimFs(seed=1) if request.param == "sim" else _core.open_fs("threads")
    yield fs, "" if request.param == "sim" else str(tmp_path)
    fs.close()


def opened(fs: Any, root: str, **options: Any) -> Store:
    store = Store(fs, f"{root}/run", keep=1, **options)
    store.create()
    store.recover()
    return store


def write(fs: Any, store: Store, step: int) -> bool:
    """D1 and D2; whether a file was used again."""
    store.begin(step)
    file, reused = store.data_file(step, DATA, BYTES)
    file.close()
    fs.write_file(f"{store.partial(step)}/{DATA}", b"%d" % step * BYTES)
    return reused


@LINKED
def test_files_of_retired_steps(disk: tuple[Any, str], is_linked: bool) -> None:
    fs, root = disk
    store = opened(fs, root)
    for step in (1, 2):
        write(fs, store, step)
        store.commit(step, b"%d" % step)
        if step == 1 and is_linked:
            fs.link(f"{store.path(1)}/{DATA}", f"{root}/other")
    store.retain()
    assert write(fs, store, 3) is not is_linked
    if is_linked:
        assert fs.read_file(f"{root}/other", BYTES) == b"1" * BYTES


@LINKED
def test_files_of_a_save_that_a_crash_ended(disk: tuple[Any, str], is_linked: bool) -> None:
    fs, root = disk
    store = opened(fs, root)
    write(fs, store, 1)
    if is_linked:
        fs.link(f"{store.partial(1)}/{DATA}", f"{root}/other")
    again = opened(fs, root)
    assert write(fs, again, 2) is not is_linked
    if is_linked:
        assert fs.read_file(f"{root}/other", BYTES) == b"1" * BYTES


@LINKED
def test_files_of_a_step_that_is_replaced(disk: tuple[Any, str], is_linked: bool) -> None:
    fs, root = disk
    store = opened(fs, root)
    write(fs, store, 1)
    store.commit(1, b"1")
    if is_linked:
        fs.link(f"{store.path(1)}/{DATA}", f"{root}/other")
    write(fs, store, 1)
    store.commit(1, b"1")
    assert write(fs, store, 2) is not is_linked
    if is_linked:
        assert fs.read_file(f"{root}/other", BYTES) == b"1" * BYTES


@LINKED
def test_files_of_a_copy_that_was_interrupted(disk: tuple[Any, str], is_linked: bool) -> None:
    fs, root = disk
    store = opened(fs, root)
    first, second = (copy_attempt(f"5f3a09c1-{number}", b"manifest") for number in (1, 2))
    store.begin(1, first)
    path = f"{store.partial(1, first)}/{DATA}"
    fs.write_file(path, b"1" * BYTES)
    if is_linked:
        fs.link(path, f"{root}/other")
    store.begin(1, second)
    adopted = Unfinished(fs, store.root).adopt(store.partial(1, second), DATA)
    assert (adopted is None) is is_linked


@LINKED
def test_files_in_memory(memory: Path, tmp_path: Path, is_linked: bool) -> None:
    """Both of the file that is mapped, and of the copy that the next save would overwrite."""
    levels = [statehold.Memory(path=memory, keep=1), statehold.Directory(every=1_000_000)]
    state = {"w": torch.zeros(100_000)}
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:

        def inode(step: int) -> int:
            return (memory / f"step-{step:012d}" / DATA).stat().st_ino

        def save(step: int) -> None:
            state["w"].fill_(step)
            ckpt.save(step, state).wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain(DEADLINE_S)  # older steps are retired
            inside(ckpt).levels.promotions.wait(DEADLINE_S)

        for step in (1, 2):
            save(step)
        other, used = memory / "other", inode(2)
        if is_linked:
            os.link(memory / f"step-{2:012d}" / DATA, other)
        before = other.read_bytes() if is_linked else b""
        save(3)
        save(4)
        assert (inode(4) == used) is not is_linked
        for step in (5, 6):
            save(step)
        if is_linked:
            assert other.read_bytes() == before


@LINKED
def test_a_file_that_is_ready_in_memory(memory: Path, is_linked: bool) -> None:
    fs = _core.open_fs("threads")
    memory.mkdir()
    store = opened(fs, str(memory), mapped=True)
    store.make_ready(DATA, BYTES)
    store.ready.wait()
    if is_linked:
        fs.link(f"{store.root}/.ready/{DATA}", str(memory / "other"))
    store.begin(1)
    file, reused = store.data_file(1, DATA, BYTES)
    assert reused is not is_linked
    file.close()
    store.close()
    fs.close()
