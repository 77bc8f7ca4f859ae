"""PageStore on a full disk: it goes on with what is there, and uses room that comes later."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statehold.errors import NoSpaceError
from statehold.kv import PageBatch, PageVerdict
from statehold.kv.looking import prune
from statehold.kv.tiers import MAKING, Geometry
from statehold.process.file_locks import LockFile
from statehold.units import MiB
from support.faults import must
from support.pages import SLOT, file_systems, get, key, made, page, put


class NoRoom:
    """A file system that has room for one segment, until it has room again."""

    def __init__(self, fs: Any) -> None:
        self._fs, self.refused, self.has_room, self.has_holes = fs, 0, False, False

    def open_write(self, path: str, nbytes: int, *, reuse: bool) -> Any:
        if self.has_holes or not (reuse or self.has_room or path.endswith("-000000")):
            self.refused += 1
            raise NoSpaceError("cannot open_write", errno=28, path=path)
        return self._fs.open_write(path, nbytes, reuse=reuse)

    def open_read(self, path: str, *, direct: bool = False) -> Any:
        return self._fs.open_read(path, direct=direct)


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> list[NoRoom]:
    return file_systems(monkeypatch, NoRoom)


def test_a_disk_without_room_for_a_segment_goes_on_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disks: list[NoRoom]
) -> None:
    with made(tmp_path) as store:
        first_ones = Geometry.of(2 * MiB, SLOT).segment_slots
        for first in range(0, 4 * first_ones, first_ones):
            put(store, *range(first, first + first_ones))
        stats = store.stats()
        assert disks[0].refused
        assert stats["pages"] == first_ones
        assert stats["evicted"] >= first_ones  # later pages take the place of earlier ones
    monkeypatch.undo()
    with made(tmp_path) as store:
        found = get(store, *range(3 * first_ones, 4 * first_ones))
        assert found == [PageVerdict.HIT] * first_ones


def test_a_disk_that_was_full_is_used_again(tmp_path: Path, disks: list[NoRoom]) -> None:
    count = Geometry.of(2 * MiB, SLOT).segment_slots
    with made(tmp_path) as store:
        put(store, *range(count))
        put(store, *range(count, 2 * count))
        must(store.stats()["pages"] == count)
        disks[0].has_room = True
        slots = store.stats()["pages_max"]
        for first in range(2 * count, 2 * count + slots, count):
            put(store, *range(first, first + count))
        assert store.stats()["pages"] == slots


def test_a_process_whose_disk_was_full_leaves_the_pages_of_others(
    tmp_path: Path, disks: list[NoRoom]
) -> None:
    count = Geometry.of(2 * MiB, SLOT).segment_slots
    with made(tmp_path) as store, made(tmp_path) as other:
        put(store, *range(count))
        put(store, *range(count, 2 * count))
        must(disks[0].refused > 0)
        disks[1].has_room = True
        slots = store.stats()["pages_max"]
        for first in range(100, 100 + slots, count):
            put(other, *range(first, first + count))
        evicted = store.stats()["evicted"]
        put(store, 1000)
        stats = store.stats()
        assert (stats["pages"], stats["evicted"]) == (slots, evicted + 1)


def test_pages_stay_whose_segment_has_no_room_for_others_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A prune has given storage of the segments back, and others have taken it."""
    with made(tmp_path) as store:
        slots = store.stats()["pages_max"]
        for number in range(slots):
            put(store, number)
    prune(tmp_path, to=slots // 2 * SLOT, is_done=True)
    disks = request.getfixturevalue("disks")
    with made(tmp_path) as store:
        left = store.stats()["pages"]
        must(left == slots // 2)
        disks[0].has_holes = True
        put(store, 1000)
        must(disks[0].refused > 0)
        assert store.stats()["pages"] == left
        disks[0].has_holes, disks[0].has_room = False, True
        put(store, 1001)
        assert store.stats()["pages"] == left + 1
    monkeypatch.undo()
    with made(tmp_path) as store:
        assert get(store, *range(slots)).count(PageVerdict.HIT) == left


class Makes:
    """A file system that makes a segment, and takes it away if there is no room for all of it."""

    def __init__(self, fs: Any, meanwhile: Callable[[], None], *, has_room: bool) -> None:
        self._fs, self._meanwhile, self._has_room = fs, meanwhile, has_room

    def open_write(self, path: str, nbytes: int, *, reuse: bool) -> Any:
        made = self._fs.open_write(path, nbytes, reuse=reuse)
        self._meanwhile()
        if self._has_room:
            return made
        os.unlink(path)
        raise NoSpaceError("cannot allocate", errno=28, path=path)


@pytest.mark.parametrize("has_room", [True, False])
def test_one_process_at_a_time_makes_a_segment(
    tmp_path: Path, disks: list[NoRoom], monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    begun, take, opens = threading.Event(), LockFile.take, NoRoom.open_write
    batches = list[PageBatch]()

    def taken(lock: LockFile, byte: int, timeout_s: float | None = None) -> bool:
        if batches and byte == MAKING:
            begun.set()
        return take(lock, byte, timeout_s)

    def opened_by_other(disk: NoRoom, path: str, nbytes: int, *, reuse: bool) -> Any:
        found = opens(disk, path, nbytes, reuse=reuse)
        begun.set()
        return found

    def meanwhile() -> None:
        batches.append(other.put([key(2)], [page(2)]))
        must(begun.wait(60))

    with made(tmp_path) as store, made(tmp_path) as other:
        monkeypatch.setattr(LockFile, "take", taken)
        monkeypatch.setattr(NoRoom, "open_write", opened_by_other)
        makes = Makes(disks[0]._fs, meanwhile, has_room=has_room)
        disks[0].open_write = makes.open_write  # type: ignore[method-assign]
        put(store, 1)
        other.flush()
        must(batches[0].wait() == [PageVerdict.STORED])
        assert store.stats()["unwritten"] == (not has_room)
        assert other.stats()["unwritten"] == 0
    with made(tmp_path) as store:
        assert get(store, 1, 2) == [
            PageVerdict.HIT if has_room else PageVerdict.MISS,
            PageVerdict.HIT,
        ]
