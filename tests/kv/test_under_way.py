"""PageStore: the storage has something to do between two calls, and memory is there at once."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from statehold.kv import PageVerdict
from statehold.kv.opened import OpenStore
from statehold.kv.tiers import memory_path
from statehold.units import KiB, MiB
from support.faults import must
from support.pages import PAGE, SLOT, key, made, page, put


@pytest.mark.parametrize("kind", ["get", "put"])
def test_a_call_begins_while_pages_of_the_one_before_are_under_way(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with made(tmp_path) as store:
        put(store, 1, 2)
    held, both = request.getfixturevalue("held"), threading.Event()
    job = OpenStore.job

    def later(*arguments: Any, **options: Any) -> Any:
        must(both.wait(60))
        return job(*arguments, **options)

    monkeypatch.setattr(OpenStore, "job", later)
    with made(tmp_path) as store:
        if kind == "get":
            calls = [store.get([key(n)], [bytearray(PAGE)]) for n in (1, 2)]
        else:
            calls = [store.put([key(n)], [page(n)]) for n in (3, 4)]
            stored = [call.wait() for call in calls]
            assert stored == [[PageVerdict.STORED]] * 2
        both.set()
        until = time.monotonic() + 60
        while len(held) < 2 and time.monotonic() < until:
            store.contains([key(1)])
        assert len(held) == 2
        for each in held:
            each.may_end.set()
        store.flush()
        found = [call.wait() for call in calls]
        assert found == [[PageVerdict.HIT if kind == "get" else PageVerdict.STORED]] * 2


def mapped_bytes(path: Path) -> tuple[int, int]:
    """Of the memory of the store in `path`, which is open in this process: its bytes, and how many
    of them have an entry in the table of pages."""
    # The memory of another test's store may still be mapped: its objects die at a collection.
    name = memory_path(str(path), SLOT)
    found, words = dict[str, int](), Path("/proc/self/smaps").read_text().split(name, 1)[1]
    for line in words.splitlines()[1:]:
        word, _, value = line.partition(":")
        found[word] = int(value.split()[0]) * KiB
        if word == "Rss":
            return found["Size"], found["Rss"]
    raise AssertionError(name)


def test_the_memory_is_mapped_when_the_store_is_open(tmp_path: Path) -> None:
    """Otherwise the first copies into it take several times as long."""
    try:
        mmap.mmap(-1, 4096).madvise(22)
    except OSError:
        pytest.skip("before Linux 5.14 the kernel maps nothing ahead")
    with made(tmp_path, memory=4 * MiB):
        size, present = mapped_bytes(tmp_path)
    assert size > 4 * MiB
    assert present == size
