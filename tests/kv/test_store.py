"""PageStore: what was put comes back, or is a miss, whatever happens to the files."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from statehold.cli import main
from statehold.errors import ClosedError, FormatVersionError, StorageError, UsageError
from statehold.kv import PageStore, PageVerdict
from statehold.kv.opened import OpenStore
from statehold.kv.page import HEADER_BYTES
from statehold.units import MiB
from support import scripts
from support.pages import NEW, OLD, PAGE, SLOT, get, key, made, page, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    with made(tmp_path / "pages") as opened:
        yield opened


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
    assert put(store, 3) == [PageVerdict.HIT]


def test_pages_of_other_sizes_come_back_at_their_size(store: PageStore) -> None:
    for nbytes in (1, 4096, 4097, PAGE):
        assert store.put([key(nbytes)], [page(nbytes, nbytes)]).wait() == [PageVerdict.STORED]
        found = bytearray(nbytes)
        assert store.get([key(nbytes)], [found]).wait() == [PageVerdict.HIT]
        assert found == page(nbytes, nbytes)
    assert store.get([key(1)], [bytearray(2)]).wait() == [PageVerdict.MISS]


def test_pages_are_there_when_the_store_is_opened_again(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        put(store, *range(30))
    with made(tmp_path) as store:
        assert store.stats()["memory_pages"] == 0
        assert get(store, *range(30)) == [PageVerdict.HIT] * 30
        assert store.stats()["hits"] == 30


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


def test_the_files_never_take_more_than_the_budget(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        for first in range(0, 1600, 16):
            put(store, *range(first, first + 16))
            taken = sum(each.stat().st_blocks * 512 for each in tmp_path.iterdir())
            assert taken <= 2 * MiB + 4096
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
            assert batch.wait() == [PageVerdict.HIT, PageVerdict.LATE]
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
    with pytest.raises(UsageError, match=words):
        made(tmp_path / "pages", **options)
    shutil.rmtree(tmp_path / "pages", ignore_errors=True)
    made(tmp_path / "pages").close()


def test_a_directory_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="something else than pages"):
        made(tmp_path)


def test_a_store_of_another_version_or_size_is_refused(tmp_path: Path) -> None:
    made(tmp_path).close()
    with pytest.raises(UsageError, match="other slots"):
        made(tmp_path, page_bytes=2 * PAGE)
    about = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(FormatVersionError):
        made(tmp_path)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = made(tmp_path)
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        get(store, 1)


def test_bad_calls_are_refused_at_once(store: PageStore) -> None:
    with pytest.raises(UsageError, match="not a key"):
        store.get([b""], [bytearray(1)])
    with pytest.raises(UsageError, match="too large"):
        store.put([key(1)], [bytes(PAGE + 1)])
    with pytest.raises(UsageError, match="as many buffers"):
        store.put([key(1)], [])
    with pytest.raises(UsageError, match="may be written"):
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
