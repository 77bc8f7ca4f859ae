"""Pages that go by identity, age or size: the right ones, beside processes and after a kill."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from statehold.errors import RunBusyError, UsageError, WaitTimeout
from statehold.kv import PageStore, PageVerdict, looking, opened
from statehold.kv.looking import look, prune
from statehold.process.file_locks import LockFile
from support import scripts
from support.faults import must
from support.pages import NEW, OLD, SLOT, get, made, put

HIT, MISS = PageVerdict.HIT, PageVerdict.MISS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the processes of stores."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(opened, "time", SimpleNamespace(time=lambda: clock.now_s))
    monkeypatch.setattr(looking, "TURN_S", 0.0)
    return clock


@pytest.fixture
def store(tmp_path: Path, clock: SimpleNamespace) -> Iterator[PageStore]:
    with made(tmp_path / "pages") as made_now:
        yield made_now


def used(store: PageStore, *numbers: int) -> None:
    """A page counts as used a moment after it was delivered, and before the next call."""
    for _ in range(2):
        must(get(store, *numbers) == [HIT] * len(numbers))


def taken(path: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in path.glob("segment-*"))


def freed(slots: int) -> tuple[int, int]:
    """What slots give back. A file system may need a block to say where the holes are."""
    return slots * SLOT, slots * SLOT - 4096


def test_pages_of_an_identity_go_from_files_and_memory_and_no_others(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    with made(tmp_path, identity=OLD) as store:
        put(store, *range(6))
        store.identity = NEW
        put(store, *range(6))
        before = taken(tmp_path)
        assert prune(tmp_path, identities=[OLD]) == ({OLD.hex(): 6}, 6 * SLOT)
        assert look(tmp_path).pages[OLD.hex()] == 6  # nothing has changed yet
        assert prune(tmp_path, identities=[OLD], is_done=True) == ({OLD.hex(): 6}, 6 * SLOT)
        assert get(store, *range(6)) == [HIT] * 6
        store.identity = OLD
        assert get(store, *range(6)) == [MISS] * 6
        assert look(tmp_path, verify=True).pages == {NEW.hex(): 6}
        assert before - taken(tmp_path) in freed(6)
        assert put(store, *range(6)) == [PageVerdict.STORED] * 6
        assert get(store, *range(6)) == [HIT] * 6
    (tmp_path / "index").unlink()
    with made(tmp_path, identity=OLD) as store:
        assert get(store, *range(6)) == [HIT] * 6


def test_what_was_not_used_for_long_goes_and_a_use_counts_for_the_pages_before(
    store: PageStore, clock: SimpleNamespace
) -> None:
    put(store, *range(4))
    clock.now_s = 2000.0
    put(store, 10, 11)
    clock.now_s = 3000.0
    used(store, 1)
    assert prune(store.path, before_s=2500.0, is_done=True)[0].total() == 4
    assert get(store, *range(4), 10, 11) == [HIT, HIT, MISS, MISS, MISS, MISS]
    assert prune(store.path, before_s=3000.0, is_done=True)[0].total() == 0


def test_the_second_of_the_last_use_outlives_the_processes(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    with made(tmp_path) as store:
        put(store, 1)
    clock.now_s = 5000.0
    with made(tmp_path) as store:
        put(store, 2)
        assert prune(tmp_path, before_s=4000.0, is_done=True)[0].total() == 1
        assert get(store, 1, 2) == [MISS, HIT]


def test_the_least_used_pages_go_until_the_others_fit(store: PageStore) -> None:
    for number in range(8):
        put(store, number)
    used(store, 0)
    before = taken(Path(store.path))
    assert prune(store.path, to=5 * SLOT + 1, is_done=True)[0].total() == 3
    assert before - taken(Path(store.path)) in freed(3)
    assert prune(store.path, to=5 * SLOT, is_done=True)[0].total() == 0
    with_memory = store.stats()
    assert (with_memory["pages"], with_memory["memory_pages"]) == (5, 8)
    store.close()
    with made(Path(store.path)) as again:
        assert get(again, *range(8)) == [HIT, MISS, MISS, MISS, HIT, HIT, HIT, HIT]


def test_a_size_and_an_age_take_only_what_both_say(
    store: PageStore, clock: SimpleNamespace
) -> None:
    put(store, *range(4))
    clock.now_s = 2000.0
    put(store, *range(10, 14))
    assert prune(store.path, to=0, before_s=1500.0, is_done=True)[0].total() == 4
    assert prune(store.path, to=3 * SLOT, before_s=2500.0)[0].total() == 1


def test_many_changes_do_what_one_does(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, *range(10))
    monkeypatch.setattr(looking, "DROP_PAGES", 3)
    assert prune(store.path, is_done=True)[0].total() == 10
    assert get(store, *range(10)) == [MISS] * 10


def test_a_page_that_goes_while_it_is_read_is_a_miss_and_not_damage(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 2)
    store.close()
    begin = opened.OpenStore.job

    def pruned(self: opened.OpenStore, *args: object, **options: object) -> object:
        monkeypatch.undo()
        prune(self.path, is_done=True)
        return begin(self, *args, **options)  # type: ignore[arg-type]

    with made(Path(store.path)) as again:
        monkeypatch.setattr(opened.OpenStore, "job", pruned)
        assert get(again, 1, 2) == [MISS] * 2
        assert again.stats()["bad"] == 0


def test_a_page_that_is_written_stays(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = opened.OpenStore.job

    def pruned(self: opened.OpenStore, *args: object, **options: object) -> object:
        monkeypatch.undo()
        prune(self.path, is_done=True)
        return begin(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(opened.OpenStore, "job", pruned)
    put(store, 1, 2)
    must(opened.OpenStore.job is begin)
    assert look(store.path).pages.total() == 2
    assert get(store, 1, 2) == [HIT] * 2


KILLED = """
import os, signal
from statehold import _core
from statehold.kv import looking
def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
where, looking.DROP_PAGES = {where!r}, 2
if where == "_punch": looking._punch = killed
else: setattr(_core.PageTable, where, killed)
looking.prune({path!r}, identities=[{identity!r}], is_done=True)
"""


@pytest.mark.parametrize("where", ["drop", "_punch", "end_change"])
@pytest.mark.parametrize("is_used", [True, False])
def test_a_kill_of_a_prune_loses_no_other_page(tmp_path: Path, where: str, is_used: bool) -> None:
    path = tmp_path / "pages"
    with made(path, identity=OLD) as store:
        put(store, *range(6))
        store.identity = NEW
        put(store, *range(6))
        if not is_used:
            store.close()
        code = KILLED.format(where=where, path=str(path), identity=OLD)
        must(scripts.run(["-c", code]).returncode == -signal.SIGKILL)
        if is_used:
            assert get(store, *range(6)) == [HIT] * 6
            assert put(store, *range(20, 30)) == [PageVerdict.STORED] * 10
    with made(path, identity=NEW) as store:
        assert get(store, *range(6)) == [HIT] * 6
        store.identity = OLD
        found = get(store, *range(6))
        assert PageVerdict.BAD not in found
        assert found.count(HIT) == (6 if where == "drop" else 4)
        assert not look(path, verify=True).bad
        prune(path, identities=[OLD], is_done=True)
        assert get(store, *range(6)) == [MISS] * 6


BESIDE = """
import random, sys
from pathlib import Path
from support.pages import get, made, put
dice = random.Random({seed})
with made(Path({path!r})) as store:
    print("begins", flush=True)
    for _ in range(40):
        first = dice.randrange(60)
        put(store, *range(first, first + 8))
        get(store, *(dice.randrange(68) for _ in range(8)))
    print(store.stats()["bad"], flush=True)
"""


@pytest.mark.thorough
def test_processes_that_put_and_get_beside_prunes_find_no_wrong_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pages"
    made(path).close()
    monkeypatch.setattr(looking, "DROP_PAGES", 4)
    workers = [
        scripts.start(["-c", BESIDE.format(seed=seed, path=str(path))], stdout=scripts.PIPE)
        for seed in range(2)
    ]
    for each in workers:
        assert each.stdout is not None
        must(each.stdout.readline().strip() == "begins")
    gone = 0
    while any(each.poll() is None for each in workers):
        gone += prune(path, to=10 * SLOT, is_done=True)[0].total()
        gone += prune(path, identities=[bytes(16)], is_done=True)[0].total()
    assert gone
    for each in workers:
        assert each.stdout is not None
        said, code = each.stdout.read().strip(), each.wait()
        assert (said, code) == ("0", 0)
        each.stdout.close()
    assert not look(path, verify=True).bad


def test_a_store_that_cannot_be_pruned_says_why(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    monkeypatch.setattr(looking, "LOCK_S", 0.01)
    with contextlib.closing(LockFile(f"{store.path}/.lock")) as lock:
        must(lock.try_take(0))
        with pytest.raises(WaitTimeout, match="holds the tables"):
            prune(store.path, is_done=True)
    with monkeypatch.context() as patched:
        patched.setattr(opened, "boot", lambda: 12345)
        with pytest.raises(RunBusyError, match="another host"):
            prune(store.path, is_done=True)
    assert get(store, 1) == [HIT]
    assert prune(store.path, is_done=True)[0].total() == 1
    store.close()
    (Path(store.path) / "index").unlink()
    for is_done in (True, False):
        with pytest.raises(UsageError, match="index of the store of pages is lost"):
            prune(store.path, is_done=is_done)
