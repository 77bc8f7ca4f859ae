"""What the processes of a store count together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from observe.exposition import samples_of
from statehold import _core
from statehold.errors import UsageError
from statehold.kv import PageVerdict
from statehold.kv.looking import counts
from statehold.observe.counters import exposition
from support import scripts
from support.faults import must
from support.pages import NEW, OLD, PAGE, get, key, made, put

COUNTS = """
import os, signal
from pathlib import Path
from support.pages import get, made, put
with made(Path({path!r}), identity={identity!r}) as store:
    put(store, *range(4))
    get(store, 0, 1, 9)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_processes_count_outlives_them_however_they_end(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    with made(path, identity=NEW) as store:
        put(store, 1)
        code = COUNTS.format(path=str(path), identity=OLD)
        must(scripts.run(["-c", code]).returncode == -signal.SIGKILL)
        get(store, 1, 2)
        put(store, 1)
    found = counts(path)
    told = {name: {of: n for of, n in each.items() if n} for name, each in found.items()}
    assert told == {
        OLD.hex(): {
            "pages": 4, "stored": 4, "hit": 2, "miss": 1,
            "stored_bytes": 4 * PAGE, "hit_bytes": 2 * PAGE,
        },
        NEW.hex(): {
            "pages": 1, "stored": 1, "hit": 1, "miss": 1, "there": 1,
            "stored_bytes": PAGE, "hit_bytes": PAGE,
        },
    }  # fmt: skip
    with made(path, identity=NEW) as store:
        get(store, 1)
        assert counts(path)[NEW.hex()]["hit"] == 2
    (path / "index").unlink()
    with pytest.raises(UsageError, match="the index of the store of pages is lost"):
        counts(path)
    made(path).close()
    assert all(sum(each.values()) == each["pages"] for each in counts(path).values())


def test_a_call_is_counted_once_and_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, count = [], _core.PageTable.count

    def counted(self: _core.PageTable, seat: int, amounts: list[int]) -> None:
        calls.append(amounts)
        count(self, seat, amounts)

    monkeypatch.setattr(_core.PageTable, "count", counted)
    with made(tmp_path) as store:
        put(store, *range(10))
        late = store.get([key(1)], [bytearray(PAGE)], deadline_s=0.0)
        verdict = late.wait()
        get(store, *range(12))
        must(late.wait() == verdict)
        assert [sum(each[:7]) for each in calls] == [10, 1, 12]
        assert store.stats()["hit"] == 10 + (verdict == [PageVerdict.HIT])
    assert len(calls) == 3


def test_prometheus_sees_the_verdicts(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir(mode=0o700)
    with made(tmp_path / "pages") as store:
        put(store, 1, 2)
        get(store, 1, 2, 3)
        label = (("store", os.fspath(tmp_path / "pages")),)
        samples = samples_of(exposition())
        found = {
            name: samples[f"statehold_pages_{name}", label]
            for name in ("hit_total", "miss_total", "stored_total", "bad_total", "in_files")
        }
    assert found == {
        "hit_total": 2, "miss_total": 1, "stored_total": 2, "bad_total": 0, "in_files": 2,
    }  # fmt: skip
