"""Processes that are killed while they put, evict and read: no page is ever wrong afterwards.

STATEHOLD_PAGE_KILLS=1000 kills more often; STATEHOLD_SEED draws other moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from statehold.kv import PageVerdict
from statehold.kv.looking import look
from statehold.kv.tiers import memory_path
from statehold.process.file_locks import LockFile
from support import scripts
from support.faults import must
from support.pages import SLOT, get, made, put
from support.seeds import SEED

KILLS = int(os.environ.get("STATEHOLD_PAGE_KILLS", "6"))
PAGES = 120  # more than the files have slots for

WORKER = """
import random
from pathlib import Path
from support.pages import get, made, put
dice = random.Random({seed})
with made(Path({path!r})) as store:
    print("begins", flush=True)
    while True:
        first = dice.randrange({pages} - 8)
        put(store, *range(first, first + 8))
        get(store, *(dice.randrange({pages}) for _ in range(8)))
        print("again", flush=True)
"""


def worker(path: Path, seed: int) -> scripts.Script:
    code = WORKER.format(path=str(path), seed=seed, pages=PAGES)
    return scripts.start(["-c", code], stdout=scripts.PIPE)


CAMPAIGNS = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from kv import kills
from support.faults import must
path = Path({path!r})
counts = kills.kills(path, {kills})
must(counts["older H"] and counts["stored"] and not counts["newer B"] + counts["newer W"], counts)
must(not any(counts["older " + letter] for letter in "MBLW"), counts)
found = kills.budget(path, 1 << 20)
must(found["most"] <= found["capacity"] and found["offered"] > 2000, found)
must(found["counts agree"] and not found["uncounted"], found)
kills.HANG_S = 0.3
kills.hang(path, deadline_s=0.1)
"""


@pytest.mark.thorough
def test_pages_that_are_back_once_stay_the_files_keep_their_budget_and_a_hang_delays_nobody(
    tmp_path: Path,
) -> None:
    tests = str(Path(__file__).parents[1])
    code = CAMPAIGNS.format(tests=tests, path=str(tmp_path), kills=KILLS)
    done = scripts.run(["-c", code], timeout=120.0 + KILLS)
    must(done.returncode == 0, done.stderr)


LEAVES = """
import os, signal
from pathlib import Path
from statehold.kv.store import PageStore
from support.pages import key, made, page
PageStore._store = lambda *_: None
store = made(Path({path!r}))
store.put([key(n) for n in range(6)], [page(n) for n in range(6)]).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_pages_that_a_killed_process_had_in_memory_alone_are_written_by_the_next(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pages"
    done = scripts.run(["-c", LEAVES.format(path=str(path))])
    must(done.returncode == -signal.SIGKILL)
    with made(path) as store:
        store.flush()
    with made(path) as store:  # the memory went with the last process
        must(store.stats()["memory_pages"] == 0)
        assert get(store, *range(6)) == [PageVerdict.HIT] * 6


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The memory of a store whose only process was killed."""
    path = tmp_path / "killed"
    done = scripts.run(["-c", LEAVES.format(path=str(path))])
    must(done.returncode == -signal.SIGKILL)
    memory = Path(memory_path(str(path), SLOT))
    must(memory.exists())
    return memory


def test_the_next_store_gives_back_the_memory_of_a_killed_one_whose_directory_is_gone(
    tmp_path: Path, killed: Path
) -> None:
    with made(tmp_path / "other"):
        must(killed.exists())  # its pages may still be written
    shutil.rmtree(tmp_path / "killed")
    with made(tmp_path / "other"):
        assert not killed.exists()


def test_a_killed_store_that_was_moved_has_the_pages_of_its_memory(
    tmp_path: Path, killed: Path
) -> None:
    with contextlib.closing(LockFile(os.fspath(killed), is_made=False)) as lock:
        lock.share(0)  # or a store of another test gives it back meanwhile
        (tmp_path / "killed").rename(tmp_path / "moved")
        store = made(tmp_path / "moved")
    with store:
        store.flush()
        must(killed.exists())
        assert get(store, *range(6)) == [PageVerdict.HIT] * 6


def test_another_store_of_that_name_gives_it_back_too(tmp_path: Path, killed: Path) -> None:
    shutil.rmtree(tmp_path / "killed")
    with made(tmp_path / "killed") as store:
        assert not killed.exists()
        assert get(store, 0) == [PageVerdict.MISS]


def test_memory_that_a_process_has_stays_whatever_became_of_its_directory(tmp_path: Path) -> None:
    with made(tmp_path / "one") as store:
        put(store, *range(6))
        memory = Path(memory_path(store.path, SLOT))
        shutil.rmtree(store.path)
        with made(tmp_path / "other"):
            assert memory.exists()
        assert get(store, *range(6)) == [PageVerdict.HIT] * 6
    assert not memory.exists()


@pytest.mark.parametrize("kill", range(KILLS))
def test_no_page_is_wrong_after_a_kill(tmp_path: Path, kill: int) -> None:
    dice = random.Random(f"{SEED} {kill}")
    path = tmp_path / "pages"
    with made(path) as other:  # a process that lives sees the same tables
        put(other, *range(20))
        killed = worker(path, dice.getrandbits(32))
        assert killed.stdout is not None
        for _ in range(dice.randrange(1, 6)):
            must(killed.stdout.readline())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        killed.stdout.close()
        assert PageVerdict.BAD not in get(other, *range(PAGES))
        put(other, *range(50))
    with made(path) as again:
        found = get(again, *range(PAGES))
        assert PageVerdict.BAD not in found
        assert found.count(PageVerdict.HIT) >= 50 - 16
        assert put(again, *range(PAGES, PAGES + 8)) == [PageVerdict.STORED] * 8
    assert not look(path, verify=True).bad
