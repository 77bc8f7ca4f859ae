"""PageStore: what was put comes back, or is a miss, whatever happens to the files."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from statehold import _core
from statehold.cli import main
from statehold.errors import (
    ClosedError,
    FormatVersionError,
    RunBusyError,
    StorageError,
    UsageError,
    WaitTimeout,
)
from statehold.kv import PageBatch, PageStore, PageVerdict
from statehold.kv import store as kv_store
from statehold.kv.looking import look
from statehold.kv.opened import OpenStore
from statehold.kv.page import HEADER_BYTES
from statehold.kv.tiers import SLOTS_MIN
from statehold.units import KiB, MiB
from support import scripts
from support.faults import must
from support.pages import NEW, OLD, PAGE, SLOT, Held, get, key, made, page, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    with made(tmp_path / "pages") as made_now:
        yield made_now


def slots_of(path: Path) -> list[tuple[Path, int]]:
    """Where pages are in the files."""
    found = []
    for segment in sorted(path.glob("segment-*")):
        raw = segment.read_bytes()
        found += [
            (segment, at) for at in range(0, len(raw), SLOT) if raw[at : at + 8] == b"SHKVPAGE"
        ]
    return found


def change(segment: Path, at: int, raw: bytes) -> None:
    with open(segment, "r+b") as file:
        file.seek(at)
        file.write(raw)


def test_pages_come_back(store: PageStore) -> None:
    assert put(store, 1, 2, 3) == [PageVerdict.STORED] * 3
    assert store.contains([key(1), key(4)]) == [True, False]
    assert get(store, 3, 4, 1) == [PageVerdict.HIT, PageVerdict.MISS, PageVerdict.HIT]
    assert put(store, 3) == [PageVerdict.THERE]


@pytest.mark.parametrize("slots", [15, 16, 17])
def test_any_number_of_slots_will_do(tmp_path: Path, slots: int) -> None:
    with made(tmp_path, memory=slots * SLOT, capacity=slots * SLOT + 64 * KiB) as store:
        assert put(store, 1, 2) == [PageVerdict.STORED] * 2
        assert get(store, 1, 2) == [PageVerdict.HIT] * 2


def test_pages_of_other_sizes_come_back_at_their_size(store: PageStore) -> None:
    for nbytes in (1, 4096, 4097, PAGE):
        must(store.put([key(nbytes)], [page(nbytes, nbytes)]).wait() == [PageVerdict.STORED])
        found = bytearray(nbytes)
        must(store.get([key(nbytes)], [found]).wait() == [PageVerdict.HIT])
        assert found == page(nbytes, nbytes)
    other = store.get([key(1)], [bytearray(2)]).wait()
    assert other == [PageVerdict.MISS]


def test_a_tensor_is_told_how_it_becomes_a_buffer(store: PageStore) -> None:
    tensor: Any = torch.zeros(4)
    for move in (store.put, store.get):
        with pytest.raises(UsageError, match=r"tensor\.numpy\(\)"):
            move([key(1)], [tensor])


def test_pages_are_there_when_the_store_is_opened_again(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, *range(30))
    with made(tmp_path) as store:
        assert store.stats()["memory_pages"] == 0
        assert get(store, *range(30)) == [PageVerdict.HIT] * 30
        assert store.stats()["hit"] == 30


def test_more_pages_than_memory_are_read_from_files(store: PageStore) -> None:
    for first in range(0, 60, 10):
        assert put(store, *range(first, first + 10)) == [PageVerdict.STORED] * 10
    assert store.stats()["memory_pages"] <= 16
    assert get(store, *range(60)) == [PageVerdict.HIT] * 60


def test_pages_of_another_identity_are_not_found(tmp_path: Path) -> None:
    with made(tmp_path, identity=OLD) as store:
        put(store, 1, 2)
        store.identity = NEW
        assert get(store, 1, 2) == [PageVerdict.MISS] * 2
        assert not any(store.contains([key(1), key(2)]))
        store.identity = OLD
        assert get(store, 1, 2) == [PageVerdict.HIT] * 2


def test_an_identity_too_many_is_refused_and_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(tmp_path, identity=OLD, memory=0) as store:
        with monkeypatch.context() as patched:  # other processes use all spaces
            patched.setattr(_core.PageTable, "space", lambda *_: -1)
            with pytest.raises(RunBusyError, match="too many identities") as refused:
                made(tmp_path, identity=NEW)
            assert refused.value.hint
            with pytest.raises(RunBusyError, match="too many identities"):
                store.identity = NEW
            assert put(store, *range(3 * SLOTS_MIN)) == [PageVerdict.DROPPED] * 3 * SLOTS_MIN
            assert get(store, 0) == [PageVerdict.MISS]
        assert put(store, *range(SLOTS_MIN)) == [PageVerdict.STORED] * SLOTS_MIN


def test_the_files_never_take_more_than_the_budget(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        for first in range(0, 1600, 16):
            put(store, *range(first, first + 16))
            taken = sum(each.stat().st_blocks * 512 for each in tmp_path.iterdir())
            assert taken <= 2 * MiB
        stats = store.stats()
        assert stats["evicted"]
        assert stats["pages"] + stats["evicted"] == 1600
        newest = get(store, *range(1590, 1600))
        assert newest == [PageVerdict.HIT] * 10


@pytest.mark.parametrize("where", ["magic", "key", "checksum", "payload", "zeros"])
def test_a_flipped_bit_is_no_page(tmp_path: Path, where: str) -> None:
    at = {"magic": 0, "key": 80, "checksum": 4090, "payload": 4096 + 777, "zeros": SLOT - 5}[where]
    with made(tmp_path) as store:
        put(store, *range(8))
    segment, begin = slots_of(tmp_path)[3]
    raw = segment.read_bytes()[begin + at]
    change(segment, begin + at, bytes([raw ^ 4]))
    with made(tmp_path) as store:
        found = get(store, *range(8))
        assert found.count(PageVerdict.BAD) == 1
        assert found.count(PageVerdict.HIT) == 7
        bad = found.index(PageVerdict.BAD)
        assert get(store, bad) == [PageVerdict.MISS]
        assert put(store, bad) == [PageVerdict.STORED]
        assert get(store, bad) == [PageVerdict.HIT]


def test_pages_that_have_changed_places_are_bad(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, *range(8))
    (one, first), (two, second) = slots_of(tmp_path)[2:4]
    raw = one.read_bytes()[first : first + SLOT], two.read_bytes()[second : second + SLOT]
    change(one, first, raw[1])
    change(two, second, raw[0])
    with made(tmp_path) as store:
        assert get(store, *range(8)).count(PageVerdict.BAD) == 2


@pytest.mark.parametrize("left", [0, 10_000, 200_000])
def test_a_segment_that_was_cut_loses_its_own_pages_alone(tmp_path: Path, left: int) -> None:
    with made(tmp_path) as store:
        put(store, *range(40))
    first = sorted(tmp_path.glob("segment-*"))[0]
    os.truncate(first, left)
    with made(tmp_path) as store:
        found = get(store, *range(40))
        assert PageVerdict.HIT in found
        assert PageVerdict.BAD in found
        assert put(store, *range(40)).count(PageVerdict.DROPPED) == 0


def test_pages_are_found_again_without_the_table(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, *range(40))
    (tmp_path / "index").unlink()
    with made(tmp_path) as store:
        assert get(store, *range(40)) == [PageVerdict.HIT] * 40


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_table_costs_pages_and_nothing_else(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with made(tmp_path) as store:
        put(store, *range(40))
    raw = bytearray((tmp_path / "index").read_bytes())
    for _ in range(50):
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    (tmp_path / "index").write_bytes(raw)
    with made(tmp_path) as store:
        assert len(store.contains([key(n) for n in range(40)])) == 40
        get(store, *range(40))
        put(store, *range(100, 140))
        get(store, *range(100, 140))


class Stuck:
    """A job that the storage never ends."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, timeout: float | None) -> bool:
        self.waits += 1
        return False

    def cancel(self) -> None: ...


def test_a_storage_that_hangs_makes_a_call_late_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(tmp_path) as store:
        put(store, *range(4))
    with made(tmp_path) as store:
        put(store, 9)
        stuck = Stuck()
        with monkeypatch.context() as patched:
            patched.setattr(OpenStore, "job", lambda *_, **__: stuck)
            into = [bytearray(PAGE), bytearray(PAGE)]
            batch = store.get([key(9), key(1)], into, deadline_s=0.2)
            must(batch.wait() == [PageVerdict.HIT, PageVerdict.LATE])
        assert into[1] == bytes(PAGE)
        assert get(store, 9, 2) == [PageVerdict.HIT, PageVerdict.HIT]
        assert stuck.waits


def test_a_storage_that_fails_leaves_the_pages_in_memory(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> object:
        raise StorageError("pwrite failed", errno=5, path="segment-000000")

    with monkeypatch.context() as patched:
        patched.setattr(OpenStore, "job", fails)
        assert put(store, 1, 2) == [PageVerdict.STORED] * 2
        assert put(store, 3) == [PageVerdict.STORED]
    assert get(store, 1, 2, 3) == [PageVerdict.HIT] * 3
    assert store.stats()["pages"] == 0
    assert caplog.text.count("could not write a page") == 1


@pytest.mark.parametrize("is_write", [True, False], ids=["written", "read"])
def test_a_page_that_the_storage_refuses_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_write: bool
) -> None:
    """Pages move together; each moves alone if that fails."""
    begin, refused = OpenStore.job, list[int]()

    def job(self: OpenStore, moves: list[Any], **options: Any) -> Any:
        if options.get("is_write", False) is is_write and any(there == 2 for _, there, _ in moves):
            refused.append(len(moves))
            raise StorageError("it failed", errno=5, path="segment-000000")
        return begin(self, moves, **options)

    monkeypatch.setattr(OpenStore, "job", job)
    with made(tmp_path) as store:
        put(store, *range(6))
    with made(tmp_path) as store:
        found = get(store, *range(6))
    assert found.count(PageVerdict.HIT) == 5
    assert refused == [6, 1]


SECOND = """
from pathlib import Path
from statehold.kv import PageVerdict
from support.pages import get, made, put
with made(Path({path!r})) as store:
    found = get(store, *range(20)), put(store, *range(20, 30))
    assert found == ([PageVerdict.HIT] * 20, [PageVerdict.STORED] * 10), (found, store.stats())
"""


def test_a_second_process_finds_and_adds_pages(store: PageStore) -> None:
    put(store, *range(20))
    code = SECOND.format(path=store.path)
    done = scripts.run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert get(store, *range(30)) == [PageVerdict.HIT] * 30


LATE_CLOSE = """
import atexit
from pathlib import Path
from statehold.process.worker import Worker
from support.pages import made, put
store, later = made(Path({path!r})), Worker("later")
atexit.register(store.close)  # by then, the threads have ended
later.submit(lambda: put(store, *range(10)))
"""
# The writing thread gets the order to end before it begins to write.
UNDER_WAY = """
import atexit, threading
from pathlib import Path
from statehold.process import worker
from support.pages import key, made, page
store, may_begin, end = made(Path({path!r})), threading.Event(), worker._end
atexit.register(store.close)

def ended(thread, actions):
    if thread.name.startswith("statehold-kv-write"):
        actions.put(None)
        may_begin.set()
    end(thread, actions)

worker._end = ended
store._write.submit(may_begin.wait)
store.put([key(n) for n in range(10)], [page(n) for n in range(10)]).wait()
"""


@pytest.mark.parametrize("script", [LATE_CLOSE, UNDER_WAY])
def test_a_store_that_is_closed_at_the_very_end_has_what_threads_have_put(
    tmp_path: Path, script: str
) -> None:
    done = scripts.run(["-c", script.format(path=str(tmp_path / "pages"))])
    assert (done.returncode, done.stderr) == (0, "")
    with made(tmp_path / "pages") as store:
        assert get(store, *range(10)) == [PageVerdict.HIT] * 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 10_000}, "capacity of a store of pages is too small"),
        ({"capacity": 1 << 60}, "larger than its disk"),
        ({"identity": b"short"}, "not an identity"),
        ({"page_bytes": "much"}, "not a size in bytes"),
    ],
)
def test_a_senseless_argument_is_refused(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        made(tmp_path / "pages", **options)
    assert refused.value.hint
    shutil.rmtree(tmp_path / "pages", ignore_errors=True)
    made(tmp_path / "pages").close()


def test_a_directory_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="no store of pages"):
        made(tmp_path)


def test_a_store_of_another_version_or_size_is_refused(tmp_path: Path) -> None:
    made(tmp_path).close()
    with pytest.raises(UsageError, match="other slots"):
        made(tmp_path, page_bytes=2 * PAGE)
    about = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**about, "format": 1}))
    with pytest.raises(FormatVersionError, match="another version") as refused:
        made(tmp_path)
    assert refused.value.hint
    with pytest.raises(FormatVersionError):
        look(tmp_path)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = made(tmp_path)
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        get(store, 1)


def test_bad_calls_are_refused_at_once(store: PageStore) -> None:
    with pytest.raises(UsageError, match="not a key"):
        store.get([b""], [bytearray(1)])
    with pytest.raises(UsageError, match="does not fit"):
        store.put([key(1)], [bytes(PAGE + 1)])
    with pytest.raises(UsageError, match="as many buffers"):
        store.put([key(1)], [])
    with pytest.raises(UsageError, match="another kind"):
        store.get([key(1)], [memoryview(b"constant")])  # type: ignore[list-item]


def test_the_command_counts_and_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with made(tmp_path, identity=OLD) as store:
        put(store, *range(5))
    assert main(["kv", "verify", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["pages"] == {OLD.hex(): 5}
    segment, begin = slots_of(tmp_path)[2]
    change(segment, begin + HEADER_BYTES, b"damage")
    assert main(["kv", "ls", str(tmp_path)]) == 0
    assert main(["kv", "verify", str(tmp_path)]) == 1
    assert f"damaged: {segment.name} at {begin}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["kv"])
    assert main(["kv", "ls", str(tmp_path / "nothing")]) == 2


def test_verifying_beside_a_writer_reports_no_page_that_is_on_its_way(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with made(tmp_path) as store:
        put(store, 1)
        held = request.getfixturevalue("held")
        must(store.put([key(2)], [page(2)]).wait() == [PageVerdict.STORED])
        while not held:  # the thread that writes has begun nothing yet
            store.contains([key(2)])
        must(held[0].is_moved())
        (_, _), (segment, at) = slots_of(tmp_path)
        for where in (at, at + HEADER_BYTES):  # its header is torn, or half of it is there
            raw = segment.read_bytes()[where : where + 8]
            change(segment, where, b"torn now")
            assert look(tmp_path, verify=True).bad == []
            change(segment, where, raw)
        held[0].may_end.set()
        store.flush()
        change(segment, at + HEADER_BYTES, b"damage")
        assert look(tmp_path, verify=True).bad == [f"{segment.name} at {at}"]


def test_verifying_beside_a_writer_reports_no_page_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another page takes the slot between the look at its header and that at its bytes."""
    checksum = _core.xxh3_64

    def replaced(payload: bytes) -> int:
        monkeypatch.setattr(_core, "xxh3_64", checksum)
        put(store, *range(100, 100 + slots))
        return 0

    with made(tmp_path) as store:
        slots = store.stats()["pages_max"]
        put(store, *range(slots))
        monkeypatch.setattr(_core, "xxh3_64", replaced)
        assert look(tmp_path, verify=True).bad == []


def test_damage_is_reported_without_the_table(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, 1)
    (segment, at), *_ = slots_of(tmp_path)
    change(segment, at + HEADER_BYTES, b"damage")
    (tmp_path / "index").unlink()
    assert look(tmp_path, verify=True).bad == [f"{segment.name} at {at}"]


def test_an_index_of_another_build_is_made_again_and_stays_as_it_is_for_those_who_map_it(
    tmp_path: Path,
) -> None:
    with made(tmp_path) as store:
        put(store, *range(5))
    index = tmp_path / "index"
    index.write_bytes(index.read_bytes()[: -2 * 4096])
    with open(index, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as old:
        begin = old[:8]
        with made(tmp_path) as store:
            assert get(store, *range(5)) == [PageVerdict.HIT] * 5
        assert old[:8] == begin
        assert len(old) == os.fstat(file.fileno()).st_size


NOWHERE = 1000  # a page that no test puts


def get_late(store: PageStore, held: list[Held], *numbers: int) -> None:
    """Have a load of these pages under way whose call was given up."""
    into = [bytearray(PAGE) for _ in numbers]
    while not held:  # a call that finds the table taken for a moment begins no load
        late = store.get([key(n) for n in numbers], into, deadline_s=0.0)
        must(late.wait() == [PageVerdict.LATE] * len(numbers))
        must(get(store, NOWHERE) == [PageVerdict.MISS])  # the thread that reads has come so far


def test_no_call_under_way_gives_pages_of_the_identity_before(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with made(tmp_path, identity=OLD) as store:
        put(store, 1)
    held = request.getfixturevalue("held")
    with made(tmp_path, identity=OLD) as store:
        batch = store.get([key(1)], [bytearray(PAGE)])
        while not held:  # the thread that reads has begun none yet
            store.contains([key(1)])
        store.identity = NEW
        held[0].may_end.set()
        verdicts = batch.wait()
        assert verdicts == [PageVerdict.MISS]


def test_a_page_that_comes_late_stays_where_it_is(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with made(tmp_path, identity=OLD) as store:
        put(store, 1)
    held = request.getfixturevalue("held")
    with made(tmp_path, identity=OLD) as store:
        get_late(store, held, 1)
        get(store, 9)  # the thread that reads has left the page behind
        store.identity = NEW
        held[0].may_end.set()
        get(store, 9)  # now it finds the page
        store.identity = OLD
        found = get(store, 1)
        assert found == [PageVerdict.HIT]
        assert store.stats()["bad"] == 0


def test_a_page_that_is_asked_at_another_size_stays(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, 1)
    with made(tmp_path) as store:
        small = store.get([key(1)], [bytearray(4096)]).wait()
        assert small == [PageVerdict.MISS]
        found = get(store, 1)
        assert found == [PageVerdict.HIT]


def test_a_slot_that_another_page_fills_by_the_time_it_is_read_is_no_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the table and the copy, another process takes the slot of the page."""
    is_half, may_go_on = threading.Event(), threading.Event()
    fill, find, leaf = _core.fill_page, _core.PageTable.find_all, SLOTS_MIN - 1

    def half_filled(address: int, view: memoryview, *about: Any) -> None:
        ctypes.memmove(address + HEADER_BYTES, view.tobytes(), len(view) // 2)
        is_half.set()
        must(may_go_on.wait(60))
        fill(address, view, *about)

    def found(table: _core.PageTable, indices: list[int]) -> list[int]:
        slots = find(table, indices)
        monkeypatch.setattr(_core.PageTable, "find_all", find)
        batches.append(other.put([key(100)], [page(100)]))
        must(is_half.wait(60))
        return slots

    batches = list[PageBatch]()
    with made(tmp_path, memory=0) as store, made(tmp_path, memory=0) as other:
        put(store, *range(SLOTS_MIN))
        monkeypatch.setattr(_core, "fill_page", half_filled)
        monkeypatch.setattr(_core.PageTable, "find_all", found)
        into = bytearray(PAGE)
        must(store.get([key(leaf)], [into]).wait() == [PageVerdict.HIT])
        may_go_on.set()
        assert into == page(leaf)
        must(batches[0].wait() == [PageVerdict.STORED])


def test_a_page_that_is_used_in_memory_stays_in_the_files(tmp_path: Path) -> None:
    with made(tmp_path, capacity=1 * MiB, memory=64 * SLOT) as store:
        slots = look(tmp_path).geometry.slots
        for number in range(slots):  # in calls of their own: none of them follows another one
            must(store.put([key(number)], [page(number)]).wait() == [PageVerdict.STORED])
        store.flush()
        get(store, 0)
        put(store, slots)
    with made(tmp_path, capacity=1 * MiB) as store:
        found = get(store, 0, 1)
        assert found == [PageVerdict.HIT, PageVerdict.MISS]


def test_a_call_waits_for_no_memory_that_late_loads_have(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    numbers = range(SLOTS_MIN)
    with made(tmp_path) as store:
        put(store, *range(SLOTS_MIN + 1))
    held = request.getfixturevalue("held")
    with made(tmp_path, memory=0) as store:
        get_late(store, held, *numbers)
        more = store.get([key(SLOTS_MIN)], [bytearray(PAGE)], deadline_s=math.inf).wait()
        assert len(held) == 1
        assert more == [PageVerdict.LATE]
        for job in held:
            job.may_end.set()


def test_a_put_waits_for_memory_that_loads_have(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, take, is_full = range(SLOTS_MIN), _core.PageTable.take, threading.Event()

    def taken(table: _core.PageTable, *arguments: Any) -> int:
        if (slot := take(table, *arguments)) < 0:
            is_full.set()
        return slot

    with made(tmp_path) as store:
        put(store, *numbers)
    held = request.getfixturevalue("held")
    with made(tmp_path, memory=0) as store:
        monkeypatch.setattr(_core.PageTable, "take", taken)
        loads = store.get([key(n) for n in numbers], [bytearray(PAGE) for _ in numbers])
        while not held:  # the thread that reads has begun nothing yet
            store.contains([key(0)])
        more = store.put([key(100)], [page(100)])
        must(is_full.wait(60))
        held[0].may_end.set()
        must(loads.wait() == [PageVerdict.HIT] * SLOTS_MIN)
        verdicts = more.wait()
        assert verdicts == [PageVerdict.STORED]
        while len(held) < 2:
            store.contains([key(100)])
        held[1].may_end.set()


def test_a_put_has_the_memory_of_late_loads_that_have_ended(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    numbers = range(SLOTS_MIN)
    with made(tmp_path) as store:
        put(store, *numbers)
    held = request.getfixturevalue("held")
    with made(tmp_path, memory=0) as store:
        get_late(store, held, *numbers)
        get(store, 99)  # the thread that reads has left the pages behind
        held[0].may_end.set()
        verdicts = store.put([key(100)], [page(100)]).wait()
        assert verdicts == [PageVerdict.STORED]
        while len(held) < 2:  # the thread that writes has begun nothing yet
            store.contains([key(100)])
        held[1].may_end.set()


def test_a_call_that_is_late_at_the_tables_keeps_no_memory(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load has all the memory when another process holds the tables for too long."""
    with made(tmp_path) as store:
        put(store, *range(SLOTS_MIN + 1))
    held, changing, is_late = request.getfixturevalue("held"), OpenStore.changing, threading.Event()

    def late(self: OpenStore, timeout_s: float | None) -> Any:
        if held and timeout_s is not None:
            is_late.set()
            raise WaitTimeout("another process holds the tables of the store")
        return changing(self, timeout_s)

    with made(tmp_path, memory=0) as store:
        monkeypatch.setattr(OpenStore, "changing", late)
        numbers = range(SLOTS_MIN + 1)
        store.get([key(n) for n in numbers], [bytearray(PAGE) for _ in numbers])
        must(is_late.wait(60))
        for job in held:
            job.may_end.set()
        monkeypatch.undo()
        found = get(store, *numbers)
        assert found == [PageVerdict.HIT] * len(numbers)


def chained(store: PageStore, *numbers: int, after: int | None = None, score: float = 0.0) -> None:
    batch = store.put(
        [key(n) for n in numbers],
        [page(n) for n in numbers],
        after=None if after is None else key(after),
        scores=[score] * len(numbers),
    )
    must(batch.wait() == [PageVerdict.STORED] * len(numbers))
    store.flush()


def test_pages_that_were_put_do_not_go_before_those_that_follow_them(tmp_path: Path) -> None:
    with made(tmp_path, capacity=1 * MiB) as store:
        slots = look(tmp_path).geometry.slots
        chained(store, *range(8))
        chained(store, *range(8, slots), after=7)
        chained(store, 1000)
        there = store.contains([key(n) for n in range(slots)])
        assert store.stats()["evicted"] == 1
        assert there == [True] * (slots - 1) + [False]


def test_pages_that_new_ones_follow_do_not_go_for_them(tmp_path: Path) -> None:
    with made(tmp_path, capacity=1 * MiB) as store:
        slots = store.stats()["pages_max"]
        chained(store, *range(8))
        chained(store, *range(100, 100 + slots - 8))
        chained(store, *range(8, 12), after=7)
        assert store.contains([key(n) for n in range(12)]) == [True] * 12
        assert store.stats()["evicted"] == 4


def test_memory_keeps_the_pages_that_new_ones_follow(tmp_path: Path) -> None:
    """A put says that the first of its pages are there, and needs memory for the others."""
    with made(tmp_path, memory=0) as store:
        chained(store, *range(4))
        chained(store, *range(100, 100 + SLOTS_MIN - 4))
        put(store, *range(6))
        for segment in tmp_path.glob("segment-*"):
            change(segment, 0, bytes(segment.stat().st_size))
        assert get(store, *range(6)) == [PageVerdict.HIT] * 6


def test_a_score_stays_with_its_page(tmp_path: Path) -> None:
    with made(tmp_path, capacity=1 * MiB) as store:
        slots = store.stats()["pages_max"]
        for number in range(slots):
            chained(store, number, score=-1.0 if number in (3, 5) else 1.0)
    (tmp_path / "index").unlink()  # the headers have it, too
    with made(tmp_path, capacity=1 * MiB) as store:
        chained(store, 1000, 1001)
        there = store.contains([key(n) for n in range(slots)])
        assert [number for number in range(slots) if not there[number]] == [3, 5]


@pytest.mark.parametrize("scores", [[], [1.0, 2.0], [math.nan]])
def test_scores_that_are_none_are_refused(store: PageStore, scores: list[float]) -> None:
    with pytest.raises(UsageError, match="a score for each page"):
        store.put([key(1)], [page(1)], scores=scores)


@pytest.mark.parametrize("score", [1e39, -1.7e308])
def test_a_score_may_be_any_finite_number(tmp_path: Path, score: float) -> None:
    """Also one that a float of 32 bits has no room for."""
    with made(tmp_path, memory=0) as store:
        for first in range(0, 2 * SLOTS_MIN, 4):
            chained(store, *range(first, first + 4), score=score)
    (tmp_path / "index").unlink()
    with made(tmp_path) as store:
        assert get(store, *range(2 * SLOTS_MIN)) == [PageVerdict.HIT] * 2 * SLOTS_MIN


def test_times_and_sizes_that_are_none_are_refused(store: PageStore) -> None:
    with pytest.raises(UsageError, match="not a time"):
        store.get([key(1)], [bytearray(1)], deadline_s=math.nan)
    with pytest.raises(UsageError, match="does not fit"):
        store.put([key(1)], [b""])
    with pytest.raises(UsageError, match="needs bytes"):
        made(Path(store.path), page_bytes=0)
    found = store.get([key(1)], [bytearray(1)], deadline_s=math.inf).wait()
    assert found == [PageVerdict.MISS]


def test_a_storage_that_hangs_keeps_neither_flush_nor_close_waiting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    held: list[Held],
) -> None:
    monkeypatch.setattr(kv_store, "CLOSE_S", 0.05)
    store = made(tmp_path)
    must(store.put([key(1)], [page(1)]).wait() == [PageVerdict.STORED])
    with pytest.raises(WaitTimeout, match="not in files yet"):
        store.flush(timeout_s=0.05)
    assert get(store, 1) == [PageVerdict.HIT]
    store.close()
    assert "hangs" in caplog.text
    assert held
    for job in held:
        job.may_end.set()
    kv_store.hanging.clear()


def test_a_load_waits_for_memory_that_is_to_be_written(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with made(tmp_path, memory=0) as store:
        put(store, 100)
    held = request.getfixturevalue("held")
    with made(tmp_path, memory=0) as store:
        numbers = range(SLOTS_MIN)
        full = store.put([key(n) for n in numbers], [page(n) for n in numbers]).wait()
        must(full == [PageVerdict.STORED] * SLOTS_MIN)  # and none is in a file yet
        into = bytearray(PAGE)
        batch = store.get([key(100)], [into])
        while not batch.is_over():
            for job in [*held]:
                job.may_end.set()
            store.contains([key(100)])
        must(batch.wait() == [PageVerdict.HIT])
        assert into == page(100)
