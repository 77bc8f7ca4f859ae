"""What files may take of memory, and what ranks that save together count of each other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from statehold import _core
from statehold.errors import NoSpaceError
from statehold.io import memory_room
from statehold.io.memory_room import open_file, spare_memory
from statehold.process.host_memory import Room
from statehold.steps.store import Store
from statehold.units import GiB

PAGE = 4096


class Opened:
    """In place of a file system: which files were opened."""

    backend = "threads"

    def __init__(self) -> None:
        self.paths: list[str] = []

    def open_write(self, path: str, nbytes: int, reuse: bool, **_: object) -> None:
        self.paths.append(os.path.basename(path))
        with open(path, "r+b" if reuse else "xb") as file:
            file.write(bytes(nbytes))


@pytest.fixture
def fs(monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setattr(memory_room, "is_memory", lambda _: True)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    free(monkeypatch, 16 * PAGE)
    return Opened()


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory_room, "available", lambda: Room(nbytes, "left to the group /job"))


@pytest.mark.parametrize(
    ("free_bytes", "spare"), [(0, 0), (GiB, GiB // 2), (4 * GiB, 3 * GiB), (80 * GiB, 70 * GiB)]
)
def test_some_memory_stays_free(monkeypatch, free_bytes: int, spare: int) -> None:
    free(monkeypatch, free_bytes)
    assert spare_memory().nbytes == spare


def test_what_does_not_fit_is_refused_before_it_is_made(fs: Opened, tmp_path: Path) -> None:
    open_file(fs, str(tmp_path / "fits"), 8 * PAGE)
    with pytest.raises(NoSpaceError, match="left to the group /job") as caught:
        open_file(fs, str(tmp_path / "more"), 9 * PAGE)
    assert caught.value.errno == errno.ENOSPC
    assert fs.paths == ["fits"]


def test_a_file_that_has_its_pages_is_not_weighed(monkeypatch, fs: Opened, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    open_file(fs, path, 8 * PAGE)
    free(monkeypatch, 0)
    open_file(fs, path, 8 * PAGE, reuse=True)
    with pytest.raises(NoSpaceError):
        open_file(fs, path, 9 * PAGE, reuse=True)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("prefix", ["", "token-7-"])
def test_ranks_count_what_the_others_will_take(
    monkeypatch, fs: Opened, tmp_path: Path, order: tuple[int, ...], prefix: str
) -> None:
    """Whoever comes first, all three come to the same answer."""
    (tmp_path / f"{prefix}old-rank-00000-1").write_bytes(bytes(64 * PAGE))  # of another save

    def left() -> int:
        ours = [each for each in tmp_path.iterdir() if each.name.startswith(f"{prefix}rank-")]
        return sum(each.stat().st_blocks * 512 for each in ours)

    for nbytes, fits in ((4 * PAGE, False), (2 * PAGE, True)):
        for rank in order:
            free(monkeypatch, 16 * PAGE - 2 * left())  # half of it may be taken
            path = str(tmp_path / f"{prefix}rank-{rank:05d}-of-00003")
            if fits:
                open_file(fs, path, nbytes, ranks=3)
            else:
                with pytest.raises(NoSpaceError, match=f"{3 * nbytes} bytes, for 3 ranks"):
                    open_file(fs, path, nbytes, ranks=3)
    assert len(fs.paths) == 3


def test_ranks_of_other_hosts_take_nothing_here(monkeypatch, fs: Opened, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    open_file(fs, str(tmp_path / "rank-00005-of-00064"), 8 * PAGE, ranks=64)


def test_a_store_finds_out_once_whether_it_weighs_its_files(
    monkeypatch, fs: Opened, tmp_path: Path
) -> None:
    asked: list[str] = []

    def is_memory(path: str) -> bool:
        asked.append(path)
        return True

    monkeypatch.setattr(memory_room, "is_memory", is_memory)
    files = _core.open_fs("threads", 4)
    store = Store(files, str(tmp_path / "run"))
    store.create()
    for step in (1, 2):
        store.begin(step)
        store.data_file(step, "fits", 8 * PAGE)[0].close()
        with pytest.raises(NoSpaceError, match="left to the group /job"):
            store.data_file(step, "more", 9 * PAGE)
    assert asked == [store.root]
    files.close()
