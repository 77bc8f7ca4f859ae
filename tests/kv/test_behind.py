"""An object store behind a store of pages: what is there comes back, and its failures cost pages.

The stores are directories here, and servers that fail each request; tests/objects has a server.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: no object stores")

from observe.exposition import samples_of
from statehold.cli import main
from statehold.errors import UsageError, WaitTimeout
from statehold.io.objects.client import ObjectClient
from statehold.kv import PageStore, PageVerdict, behind
from statehold.kv import store as kv_store
from statehold.kv.opened import OpenStore
from statehold.observe.counters import exposition
from support import s3
from support.faults import must
from support.pages import NEW, OLD, PAGE, get, key, made, page, put

HIT, MISS, STORED = PageVerdict.HIT, PageVerdict.MISS, PageVerdict.STORED


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


class Hosts:
    """Each store lies on a new host, behind which is the same object store."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        self.bucket = root / "bucket"

    def open(self, **options: Any) -> PageStore:
        self.count += 1
        behind = {"behind": f"file://{self.bucket}", **options}
        return made(self.root / f"host-{self.count}", **behind)

    def put(self, *numbers: int, **options: Any) -> None:
        """A host puts pages, and is lost."""
        with self.open(**options) as store:
            must(put(store, *numbers) == [STORED] * len(numbers))
        shutil.rmtree(store.path)

    def objects(self) -> list[Path]:
        return sorted(each for each in self.bucket.rglob("*") if each.is_file())


def test_pages_outlive_their_host(hosts: Hosts) -> None:
    hosts.put(*range(20))
    assert len(hosts.objects()) == 2
    with hosts.open() as store:
        assert get(store, *range(21)) == [HIT] * 20 + [MISS]
        assert all(store.contains([key(n) for n in range(20)]))
        assert store.stats()["behind_hit"] == 20
        assert put(store, 20) == [STORED]
    with made(Path(store.path)) as here:  # without the object store
        assert get(here, *range(21)) == [HIT] * 21


def test_pages_that_are_gone_from_the_files_are_behind(hosts: Hosts) -> None:
    for first in range(0, 180, 60):
        with made(hosts.root / "small", behind=f"file://{hosts.bucket}") as store:
            put(store, *range(first, first + 60))
    with made(hosts.root / "small", behind=f"file://{hosts.bucket}") as store:
        must(store.stats()["evicted"])
        for first in range(0, 180, 10):
            assert get(store, *range(first, first + 10)) == [HIT] * 10


def test_only_pages_of_the_identity_come(hosts: Hosts) -> None:
    hosts.put(*range(4), identity=OLD)
    with hosts.open(identity=NEW) as store:
        assert get(store, *range(4)) == [MISS] * 4
        put(store, 1)
        store.identity = OLD
        assert get(store, *range(4)) == [HIT] * 4
        store.identity = NEW
        assert get(store, 0, 1) == [MISS, HIT]


def test_an_identity_that_tables_have_no_place_for_comes_from_behind(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise WaitTimeout("no place")

    hosts.put(*range(4), identity=NEW)
    with hosts.open(identity=OLD) as store:
        assert get(store, *range(4)) == [MISS] * 4
        with monkeypatch.context() as patched:
            patched.setattr(OpenStore, "use", refuses)
            with pytest.raises(WaitTimeout):
                store.identity = NEW
        assert get(store, *range(4)) == [HIT] * 4


def test_what_an_earlier_process_has_not_sent_is_sent(hosts: Hosts) -> None:
    with made(hosts.root / "here") as store:
        put(store, *range(5))
    assert not hosts.objects()
    with made(hosts.root / "here", behind=f"file://{hosts.bucket}") as store:
        put(store, 7)  # the first listing may come when this page is still to be sent
        get(store, 9)  # waits for the first listing
    with hosts.open() as other:
        assert get(other, *range(5), 7) == [HIT] * 6


def test_later_listings_have_only_the_names_that_may_be_new(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, listed = SimpleNamespace(now_s=1000.0), dict[ObjectClient, list[Sequence[str]]]()
    is_put, begun = threading.Event(), threading.Semaphore(0)
    list_all = ObjectClient.list_all

    def listing(client: ObjectClient, directory: str, after: str | None) -> Sequence[str]:
        mine = listed.setdefault(client, [])
        if client is next(iter(listed)) and is_put.is_set():
            begun.release()
        mine.append(list_all(client, directory, after))
        return mine[-1]

    moments = SimpleNamespace(time=lambda: clock.now_s, monotonic=time.monotonic)
    monkeypatch.setattr(behind, "time", moments)
    monkeypatch.setattr(behind, "LOOK_S", 0.0)
    monkeypatch.setattr(behind, "TURN_S", 0.001)
    hosts.put(*range(20))
    clock.now_s += 2 * behind.SKEW_S
    monkeypatch.setattr(ObjectClient, "list_all", listing)
    with hosts.open() as store:
        assert get(store, 0) == [HIT]
        hosts.put(30, 31)  # one object, or two
        is_put.set()
        for _ in range(2):  # then the first of these has found what the other host put
            must(begun.acquire(timeout=60.0))
        first, *later = map(len, next(iter(listed.values())))
        assert (first, max(later)) == (2, len(hosts.objects()) - 2)
        assert get(store, 19, 30, 31) == [HIT] * 3


def test_pages_of_other_sizes_come_back(hosts: Hosts) -> None:
    sizes = (1, 4096, 4097, PAGE)
    with hosts.open() as store:
        store.put([key(n) for n in sizes], [page(n, n) for n in sizes]).wait()
    with hosts.open() as store:
        for size in sizes:
            found = bytearray(size)
            must(store.get([key(size)], [found]).wait() == [HIT])
            assert found == page(size, size)
        other = store.get([key(4096)], [bytearray(4095)]).wait()
        assert other == [MISS]


@pytest.mark.parametrize("damage", ["header", "payload", "swapped", "cut"])
def test_wrong_bytes_are_a_miss_and_are_counted(
    hosts: Hosts, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.put(*range(3))
    (where,) = hosts.objects()
    hosts.put(9)
    raw = where.read_bytes()
    size = len(raw) // 3
    flips = {"header": 70, "payload": size - 600}
    if damage in flips:
        changed = bytearray(raw)
        changed[flips[damage]] ^= 1
    else:
        changed = raw[size:] + raw[:size] if damage == "swapped" else raw[: size // 2]
    where.write_bytes(changed)
    with hosts.open() as store:
        assert get(store, 0) == [MISS]
        assert get(store, 0) == [MISS]
        assert get(store, 9) == [HIT]  # of another object
        stats = store.stats()
        assert (stats["behind_bad"], stats["behind_failed"]) == (1, 0)
        assert caplog.text.count("goes on with those that it can") == 1
        assert put(store, 0) == [STORED]
        assert get(store, 0) == [HIT]


def test_an_object_that_somebody_has_deleted_is_a_miss(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.put(*range(3))
    (hosts.bucket / OLD.hex()).mkdir()
    (hosts.bucket / bytes(16).hex() / "notes.txt").write_text("no page")
    with hosts.open() as store:
        assert get(store, 0) == [HIT]
        hosts.objects()[0].unlink()
        assert get(store, 1, 2) == [MISS] * 2
        assert not any(store.contains([key(1), key(2)]))
        assert store.stats()["behind_failed"] == 0
    assert not caplog.records


def test_a_page_that_comes_late_is_there_for_the_next_call(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.put(*range(3))
    begun, may_go = threading.Event(), threading.Event()
    fetch = ObjectClient.fetch

    def slow(client: ObjectClient, name: str, targets: Any) -> None:
        begun.set()
        may_go.wait()
        fetch(client, name, targets)

    monkeypatch.setattr(ObjectClient, "fetch", slow)
    with hosts.open() as store:
        into = bytearray(PAGE)
        batch = store.get([key(1)], [into], deadline_s=60.0)
        must(begun.wait(60.0))
        batch.settle([0], PageVerdict.LATE)  # as if its time had passed
        assert put(store, 7) == [STORED]
        assert get(store, 7) == [HIT]  # meanwhile
        may_go.set()
        assert get(store, 1) == [HIT]
        assert into == bytes(PAGE)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    """A server that answers as its `fault` says."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-the-tests")
    monkeypatch.setattr(behind, "ASK_S", 0.4)
    monkeypatch.setattr(behind, "SEND_S", 0.4)
    proxy = s3.Proxy(0)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("fault", ["denied", "busy", "drop", "stall", "gone"])
def test_an_object_store_that_fails_costs_misses_alone(
    failing: s3.Proxy, hosts: Hosts, fault: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(kv_store, "CLOSE_S", 2.0)
    failing.fault = lambda method, target: fault
    if fault == "gone":
        failing.close()
    options = {"endpoint": f"http://127.0.0.1:{failing.port}", "allow_http": True, "region": "x"}
    with hosts.open(behind="s3://bucket/pages", behind_options=options) as store:
        assert put(store, 1, 2) == [STORED] * 2
        assert get(store, 1, 2, 3) == [HIT, HIT, MISS]
        assert get(store, 4) == [MISS]
        assert store.stats()["behind_failed"] == 1
    assert fault == "gone" or failing.fired[fault]
    assert caplog.text.count("could not reach the object store behind it") == 1


def test_the_counters_are_in_serve_stats_and_in_the_metrics(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.put(*range(3))
    with hosts.open() as store:
        get(store, *range(3))
        put(store, 5)
    assert main(["kv", "serve-stats", store.path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    counted = [document[f"behind_{each}"] for each in ("hit", "sent", "bad", "failed")]
    assert counted == [3, 1, 0, 0]
    samples = samples_of(exposition())
    assert samples["statehold_pages_behind_sent_total", (("store", store.path),)] == 1


def test_a_url_that_is_none_is_refused_and_nothing_stays_open(hosts: Hosts) -> None:
    for url in ("bucket/pages", "s3://key:secret@bucket"):
        with pytest.raises(UsageError, match="not the URL of an object store"):
            hosts.open(behind=url)
        hosts.count -= 1
    with hosts.open(behind=None) as store:
        assert put(store, 1) == [STORED]
