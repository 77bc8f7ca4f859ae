"""PageStore where the system refuses something for a while: no page goes for that."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from statehold.errors import StorageError, UsageError, WaitTimeout
from statehold.io.memory_room import Room
from statehold.kv import PageVerdict, opened, tiers
from statehold.kv.looking import prune
from statehold.kv.opened import OpenStore
from statehold.process.file_locks import LockFile
from support import scripts
from support.faults import must
from support.pages import SLOT, file_systems, get, made, put

BAD, HIT, MISS = PageVerdict.BAD, PageVerdict.HIT, PageVerdict.MISS


class NoDescriptors:
    """A file system of a process that has too many files open, until `has_room`."""

    def __init__(self, fs: Any) -> None:
        self._fs, self.refused, self.has_room = fs, 0, False

    def open_write(self, path: str, nbytes: int, *, reuse: bool) -> Any:
        return self._fs.open_write(path, nbytes, reuse=reuse)

    def open_read(self, path: str, *, direct: bool = False) -> Any:
        if not self.has_room:
            self.refused += 1
            raise StorageError("cannot open_read", errno=errno.EMFILE, path=path)
        return self._fs.open_read(path, direct=direct)


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> list[NoDescriptors]:
    return file_systems(monkeypatch, NoDescriptors)


def test_a_segment_that_cannot_be_opened_keeps_its_pages(
    tmp_path: Path, systems: list[NoDescriptors]
) -> None:
    with made(tmp_path) as store:
        put(store, *range(4))
    with made(tmp_path) as store:
        assert get(store, *range(4)) == [MISS] * 4
        must(systems[1].refused > 0)
        systems[1].has_room = True
        assert get(store, *range(4)) == [HIT] * 4


def test_a_process_waits_for_another_one_that_makes_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path).close()
    monkeypatch.setattr(opened, "LOCK_S", 0.01)
    with contextlib.closing(LockFile(f"{tmp_path}/.lock")) as lock:
        must(lock.try_take(0))
        monkeypatch.setattr(opened, "MADE_A_S", 1 << 60)
        with pytest.raises(WaitTimeout, match="holds the tables"):
            made(tmp_path)
        monkeypatch.setattr(opened, "MADE_A_S", 1)
        looks, looked, take = list[int](), threading.Event(), LockFile.try_take

        def look(file: LockFile, byte: int) -> bool:
            looks.append(byte)
            if len(looks) == 50:  # it has waited longer than LOCK_S
                looked.set()
            return take(file, byte)

        monkeypatch.setattr(LockFile, "try_take", look)
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(made, tmp_path)
            must(looked.wait(60))
            lock.drop(0)
            later.result(60).close()


def test_a_slot_that_cannot_be_written_costs_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, refused = OpenStore.job, list[int]()

    def job(self: OpenStore, moves: list[Any], *, is_write: bool = False) -> Any:
        if is_write and any(there == 2 for _, there, _ in moves):
            refused.append(len(moves))
            raise StorageError("cannot write", errno=errno.EIO, path="segment-000000")
        return begin(self, moves, is_write=is_write)

    with monkeypatch.context() as patched, made(tmp_path) as store:
        patched.setattr(OpenStore, "job", job)
        slots = store.stats()["pages_max"]
        for number in range(slots + 5):
            put(store, number)
        assert refused == [1]
        stats = store.stats()
        assert (stats["unwritten"], stats["pages"]) == (1, slots - 1)
    with made(tmp_path) as store:
        put(store, 1000)
        assert store.stats()["pages"] == slots


def test_a_segment_that_is_gone_loses_its_pages_at_once(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, 1, 2)
    (tmp_path / "segment-000000").unlink()
    with made(tmp_path) as store:
        assert get(store, 1, 2) == [BAD, BAD]
        assert put(store, 1, 2) == [PageVerdict.STORED] * 2


def test_a_segment_that_is_a_link_leaves_what_it_names_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "pages", tmp_path / "other"
    with made(path) as store:
        put(store, *range(4))
    segment = path / "segment-000000"
    segment.rename(other)
    segment.symlink_to(other)
    raw = other.read_bytes()
    with made(path) as store:
        put(store, 5)
        assert get(store, 5) == [HIT]
    assert prune(path, is_done=True)[1] > 0
    assert other.read_bytes() == raw


OPENS = """
from pathlib import Path
from support.pages import made
made(Path({path!r})).close()
"""


def test_a_segment_that_is_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, 1)
    (tmp_path / "index").unlink()
    (tmp_path / "segment-000000").unlink()
    os.mkfifo(tmp_path / "segment-000000")
    done = scripts.run(["-c", OPENS.format(path=str(tmp_path))], timeout=60)
    assert done.returncode == 0


def test_a_directory_that_cannot_be_used_is_an_error_of_the_storage(tmp_path: Path) -> None:
    with made(tmp_path / "pages") as store:
        put(store, 1)
    lock = tmp_path / "pages" / ".lock"
    lock.rename(tmp_path / "lock")
    lock.symlink_to(tmp_path / "lock")
    for path in (tmp_path / "pages", tmp_path / "lock" / "pages"):
        with pytest.raises(StorageError, match="lock a store of pages"):
            made(path)


FORKS = """
import os
from pathlib import Path
from statehold.errors import ClosedError
from support.faults import must
from support.pages import SLOT, file_systems, get, made, put
path = Path({path!r})
with made(path) as store:
    put(store, 1)
    if os.fork():
        must(os.wait()[1] == 0)
        must([each.value for each in get(store, 1)] == ["hit"])
    else:
        try:
            get(store, 1)
        except ClosedError:
            store.close()
            with made(path) as own:
                must([each.value for each in get(own, 1)] == ["hit"])
            os._exit(0)
        os._exit(1)
"""


def test_a_forked_child_opens_a_store_of_its_own(tmp_path: Path) -> None:
    """The store of its parent has no threads there: a call was late, and close() failed."""
    done = scripts.run(["-c", FORKS.format(path=str(tmp_path))])
    assert done.returncode == 0, done.stderr


def test_memory_whose_making_was_killed_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(tmp_path) as store:
        memory = Path(tiers.memory_path(store.path, SLOT))
    memory.touch()
    monkeypatch.setattr(tiers, "spare_memory", lambda: Room(SLOT, "of this test"))
    with pytest.raises(UsageError, match="has no room"):
        made(tmp_path)
    assert memory.stat().st_size == 0
    memory.unlink()


def test_memory_that_is_there_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(tmp_path) as store:
        put(store, 1)
        monkeypatch.setattr(tiers, "spare_memory", lambda: Room(0, "of this test"))
        with made(tmp_path) as other:
            assert get(other, 1) == [HIT]
