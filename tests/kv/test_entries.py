"""Entries of slots make a lost table again. One that lies costs its page, and nothing else."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statehold._core import PAGE_ENTRY_BYTES
from statehold.errors import RunBusyError
from statehold.kv import PageVerdict
from statehold.kv.looking import look, prune
from statehold.kv.page import HEADER_BYTES, whole_blocks
from statehold.kv.tiers import FileTier, Geometry
from statehold.units import MiB
from support import scripts
from support.faults import must
from support.pages import SLOT, get, made, put

BAD, HIT, MISS = PageVerdict.BAD, PageVerdict.HIT, PageVerdict.MISS

PAGES = 40


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots whose headers were read by the process that opens a store."""
    slots, adopt = list[int](), FileTier.adopt

    def spied(tier: FileTier, most: int) -> Iterator[tuple[int, int]]:
        for first, count in adopt(tier, most):
            slots.extend(range(first, first + count))
            yield first, count

    monkeypatch.setattr(FileTier, "adopt", spied)
    return slots


def filled(path: Path, pages: int = PAGES) -> Geometry:
    """A store without an index whose slots hold pages, in their order."""
    with made(path) as store:
        put(store, *range(pages))
    (path / "index").unlink()
    return Geometry.read(os.fspath(path))


def entries_of(path: Path, geometry: Geometry) -> tuple[Path, slice]:
    """The first segment, and where its entries are."""
    begin = geometry.entries_at
    return path / "segment-000000", slice(begin, begin + geometry.segment_slots * PAGE_ENTRY_BYTES)


def change(
    path: Path, geometry: Geometry, changed: Callable[[bytearray], bytes | bytearray]
) -> None:
    segment, where = entries_of(path, geometry)
    raw = bytearray(segment.read_bytes())
    raw[where] = changed(raw[where])
    segment.write_bytes(raw)


def test_a_lost_table_is_made_again_without_the_headers_of_full_segments(
    tmp_path: Path, read: list[int]
) -> None:
    geometry = filled(tmp_path)
    must(PAGES % geometry.segment_slots == 0)
    read.clear()
    with made(tmp_path) as store:
        assert not read
        assert store.stats()["pages"] == PAGES
        assert get(store, *range(PAGES)) == [HIT] * PAGES
        assert put(store, *range(PAGES, 2 * PAGES)) == [PageVerdict.STORED] * PAGES


def test_a_table_that_is_lost_while_processes_use_it_is_made_again_after_them(
    tmp_path: Path,
) -> None:
    """PageStore() said before that another host uses the store."""
    with made(tmp_path) as store:
        put(store, *range(PAGES))
        (tmp_path / "index").unlink()
        with pytest.raises(RunBusyError, match="have an index that is lost") as caught:
            made(tmp_path)
        assert caught.value.hint is not None
        assert "end them" in caught.value.hint
        assert get(store, *range(PAGES)) == [HIT] * PAGES
    with made(tmp_path) as store:
        assert get(store, *range(PAGES)) == [HIT] * PAGES


KILLED = """
import os, signal
from pathlib import Path
from statehold import _core
from support.pages import made
adopt = _core.PageTable.adopt_entries
def killed(table, first, entries):
    if first:
        os.kill(os.getpid(), signal.SIGKILL)
    return adopt(table, first, entries)
_core.PageTable.adopt_entries = killed
made(Path({path!r}))
"""


def test_a_table_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    filled(tmp_path)
    done = scripts.run(["-c", KILLED.format(path=str(tmp_path))])
    must(done.returncode == -signal.SIGKILL)
    with made(tmp_path) as store:
        assert get(store, *range(PAGES)) == [HIT] * PAGES


def test_a_page_that_was_bad_is_not_named_again(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, 1, 2)
    segment = tmp_path / "segment-000000"
    raw = bytearray(segment.read_bytes())
    raw[HEADER_BYTES] ^= 1
    segment.write_bytes(raw)
    with made(tmp_path) as store:
        must(get(store, 1, 2) == [BAD, HIT])
    (tmp_path / "index").unlink()
    with made(tmp_path) as store:
        assert get(store, 1, 2) == [MISS, HIT]


def test_only_slots_that_no_page_had_are_read_once(tmp_path: Path, read: list[int]) -> None:
    geometry = filled(tmp_path, pages=PAGES + 3)
    for left in (geometry.segment_slots - 3, 0):
        read.clear()
        with made(tmp_path) as store:
            assert len(read) == left
            assert store.stats()["pages"] == PAGES + 3
        (tmp_path / "index").unlink()


def test_entries_follow_pages_that_go_for_others(tmp_path: Path, read: list[int]) -> None:
    with made(tmp_path) as store:
        for first in range(0, 5 * PAGES, 8):
            put(store, *range(first, first + 8))
        must(store.stats()["evicted"])
        there = store.stats()["pages"]
    (tmp_path / "index").unlink()
    read.clear()
    with made(tmp_path) as store:
        assert not read
        found = get(store, *range(5 * PAGES))
        assert (found.count(HIT), found.count(BAD)) == (there, 0)


def test_pages_that_were_pruned_do_not_come_back(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, *range(PAGES))
    prune(tmp_path, is_done=True)
    (tmp_path / "index").unlink()
    with made(tmp_path) as store:
        assert get(store, *range(PAGES)) == [MISS] * PAGES


def flipped(raw: bytearray) -> bytearray:
    raw[random.Random(1).randrange(len(raw))] ^= 4
    return raw


@pytest.mark.parametrize("damage", ["flipped", "torn", "zeros", "an earlier build"])
def test_slots_whose_entries_are_damaged_are_read(
    tmp_path: Path, read: list[int], damage: str
) -> None:
    geometry = filled(tmp_path)
    half = 2 * PAGE_ENTRY_BYTES + 9
    if damage == "an earlier build":
        os.truncate(entries_of(tmp_path, geometry)[0], geometry.entries_at)
    else:
        ways: dict[str, Callable[[bytearray], bytes | bytearray]] = {
            "flipped": flipped,
            "torn": lambda raw: raw[:half] + bytes(len(raw) - half),
            "zeros": lambda raw: bytes(len(raw)),
        }
        change(tmp_path, geometry, ways[damage])
    read.clear()
    with made(tmp_path) as store:
        assert read
        assert max(read) < geometry.segment_slots
        assert get(store, *range(PAGES)) == [HIT] * PAGES


def test_entries_that_lie_cost_their_pages_once(tmp_path: Path) -> None:
    geometry = filled(tmp_path)
    size = PAGE_ENTRY_BYTES
    change(tmp_path, geometry, lambda raw: raw[size : 2 * size] + raw[:size] + raw[2 * size :])
    with made(tmp_path) as store:
        found = get(store, *range(PAGES))
        assert (found.count(HIT), found.count(BAD)) == (PAGES - 2, 2)
        bad = [number for number, verdict in enumerate(found) if verdict is BAD]
        assert get(store, *bad) == [MISS] * 2
        assert put(store, *bad) == [PageVerdict.STORED] * 2
        assert get(store, *bad) == [HIT] * 2


def test_a_storage_that_refuses_entries_costs_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[int]()

    def refuse(fd: int, raw: bytes, at: int) -> int:
        refused.append(at)
        raise OSError(5, "no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        geometry = filled(tmp_path)
    must(geometry.entries_at in refused)
    with made(tmp_path) as store:
        assert get(store, *range(PAGES)) == [HIT] * PAGES


def test_entries_are_no_pages_to_those_who_look(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, *range(PAGES))
    (tmp_path / "index").unlink()
    seen = look(tmp_path, verify=True)
    assert seen.pages.total() == PAGES
    assert not seen.bad


def test_verify_reports_each_page_that_a_get_would_find_bad(tmp_path: Path) -> None:
    """Its slot has zeros, or another page; its segment was cut, or is gone."""
    with made(tmp_path) as store:
        put(store, *range(PAGES))
    count = Geometry.read(os.fspath(tmp_path)).segment_slots
    first, second, *_, last = sorted(tmp_path.glob("segment-*"))
    raw = first.read_bytes()
    first.write_bytes(raw[SLOT : 2 * SLOT] + raw[SLOT : 2 * SLOT] + bytes(SLOT) + raw[3 * SLOT :])
    os.truncate(second, 3 * SLOT + 8000)
    last.unlink()
    lost = [(first, 0), (first, 2), *((second, n) for n in range(3, count))]
    lost += [(last, n) for n in range(count)]
    seen = look(tmp_path, verify=True)
    assert seen.bad == [f"{segment.name} at {n * SLOT}" for segment, n in lost]
    assert seen.pages.total() == PAGES - len(lost)
    with made(tmp_path) as store:
        assert get(store, *range(PAGES)).count(BAD) == len(lost)


def test_the_whole_budget_may_be_given_and_no_file_goes_beyond_it(tmp_path: Path) -> None:
    """store.json was not counted."""
    capacity = Geometry.of(2 * MiB, SLOT).nbytes
    with made(tmp_path, capacity=capacity) as store:
        put(store, *range(store.stats()["pages_max"]))
    taken = sum(whole_blocks(each.stat().st_size) for each in tmp_path.iterdir())
    assert capacity - SLOT < taken <= capacity


def test_entries_count_in_the_budget(tmp_path: Path) -> None:
    geometry = filled(tmp_path)
    taken = sum(each.stat().st_size for each in tmp_path.glob("segment-*"))
    assert taken == PAGES // geometry.segment_slots * geometry.segment_bytes
