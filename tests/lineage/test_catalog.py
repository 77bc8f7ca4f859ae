"""The catalogue of runs, and the nearest relative that it proposes and a manifest confirms."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import statehold
from statehold.cli import main
from statehold.errors import StepNotFoundError, StorageError, UsageError
from statehold.format.graphs import RECORD
from statehold.lineage import Catalog, Graph, Relative, catalog, nearest, relatives
from statehold.process.file_locks import LockFile
from support.faults import DEADLINE_S, SMALL
from support.networks import mlp


def save(
    run: Path,
    step: int,
    model: nn.Module,
    metrics: Mapping[str, float] | None = None,
    *,
    recorded: bool = True,
) -> None:
    state: dict[str, Any] = {"model": model}
    if recorded:
        state["graph"] = Graph(model)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(step, state, metrics=metrics).wait("committed", DEADLINE_S)


def found(model: nn.Module, directory: Path, **options: Any) -> str | None:
    relative = nearest(model, directory, **options)
    return None if relative is None else os.path.relpath(relative.source, directory)


def test_the_longest_prefix_wins(tmp_path: Path) -> None:
    save(tmp_path / "one", 1, mlp(8, 16, 4))
    save(tmp_path / "deep" / "two", 7, mlp(8, 16, 16, 4))
    save(tmp_path / "three", 1, mlp(9, 16, 16, 16, 5))
    model = mlp(8, 16, 16, 16, 5)
    relative = nearest(model, tmp_path)
    assert relative == Relative(str(tmp_path / "deep" / "two"), 7, layers=2, total=4)
    assert str(relative) == f"{relative.source}: 2 of 4 layers"
    with statehold.Checkpointer(tmp_path / "child", **SMALL) as ckpt:
        state = {"model": model, "graph": Graph(model)}
        assert ckpt.restore(state, source=relative.source, prefix=True) == 7
        assert ckpt.restored is not None
        assert len(ckpt.restored.loaded) == 4
        ckpt.save(8, state).wait("committed", DEADLINE_S)
    (child,) = [each for each in family(tmp_path) if each["run"].endswith("child")]
    assert (child["base"], child["parent"]["step"]) == (str(tmp_path / "deep" / "two"), 7)


def family(directory: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "statehold", "tree", str(directory), "--json"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    members: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return members


def test_no_step_shares_anything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert nearest(mlp(8, 16), tmp_path / "nowhere") is None
    assert "nowhere yet" in caplog.text
    assert nearest(mlp(8, 16), tmp_path) is None
    save(tmp_path / "one", 1, mlp(9, 16))
    assert nearest(mlp(8, 16), tmp_path) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "bad@3"),  # the newest
        ({"metric": "score"}, "good@1"),
        ({"metric": "loss", "lowest": True}, "low@2"),
        ({"metric": "unknown"}, "bad@3"),
    ],
)
def test_ties_are_broken_by_a_metric(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    save(tmp_path / "good", 1, mlp(8, 16, 3), {"score": 0.9, "loss": 2.0})
    save(tmp_path / "low", 2, mlp(8, 16, 4), {"score": float("nan"), "loss": -1.0})
    save(tmp_path / "bad", 3, mlp(8, 16, 5), {"score": 0.1})
    save(tmp_path / "far", 4, mlp(9, 16, 5), {"score": 7.0, "loss": -7.0})
    assert found(mlp(8, 16, 6), tmp_path, **options) == expected


def test_steps_without_a_graph_are_compared_by_their_tensors(tmp_path: Path) -> None:
    save(tmp_path / "old", 1, mlp(8, 16, 4), recorded=False)
    assert found(mlp(8, 16, 5), tmp_path) == "old@1"
    other = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
    assert found(other, tmp_path) == "old@1"  # the limit of this kind
    save(tmp_path / "new", 1, mlp(8, 16, 16, 4))
    relative = nearest(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)), tmp_path)
    assert relative is not None
    assert relative.layers == 1


def test_a_scan_reads_what_is_new(tmp_path: Path) -> None:
    known = Catalog(tmp_path)
    save(tmp_path / "a", 1, mlp(8, 16))
    save(tmp_path / "a", 2, mlp(8, 16))
    first = known.scan()
    assert (first.runs, first.steps, first.graphs, first.read, first.gone) == (1, 2, 2, 2, 0)
    assert known.scan() == replace(first, read=0)
    save(tmp_path / "b", 1, mlp(8, 16, 4))
    save(tmp_path / "a", 2, mlp(8, 17))  # saved again
    second = known.scan()
    assert (second.runs, second.steps, second.graphs, second.read) == (2, 3, 6, 2)
    shutil.rmtree(tmp_path / "a")
    third = known.scan()
    assert (third.runs, third.steps, third.graphs, third.read, third.gone) == (1, 1, 2, 0, 2)
    (tmp_path / "b").rename(tmp_path / "c")
    assert found(mlp(8, 16, 5), tmp_path) == "c@1"
    assert known.rebuild().read == 1


def test_another_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    save(tmp_path / "runs" / "a", 1, mlp(8, 16))
    known = Catalog(tmp_path / "runs", tmp_path / "mine")
    assert nearest(mlp(8, 16), known) is not None
    assert (tmp_path / "mine").exists()
    assert os.listdir(tmp_path / "runs") == ["a"]


def test_a_damaged_run_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "good", 1, mlp(8, 16))
    save(tmp_path / "bad", 1, mlp(8, 16, 16))
    (tmp_path / "bad" / "step-000000000001" / "manifest.json").write_bytes(b"no")
    assert found(mlp(8, 16, 16), tmp_path) == "good@1"
    assert Catalog(tmp_path).scan().unreadable == [f"{tmp_path / 'bad'}@1"]
    assert "leaves out step 1" in caplog.text


def spoiled(file: Path, how: str) -> None:
    if how == "not a database":
        file.write_bytes(b"damaged" * 1000)
    elif how == "torn":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "zeros":
        raw = bytearray(file.read_bytes())
        raw[4096:] = bytes(len(raw) - 4096)
        file.write_bytes(raw)
    else:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as tables:
            tables.execute(how)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    ["not a database", "torn", "empty", "zeros", "PRAGMA user_version = 99", "DROP TABLE layers",
     "ALTER TABLE steps DROP COLUMN stamp"],
)  # fmt: skip
def test_a_damaged_catalogue_is_made_again(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(3):
        save(tmp_path / f"run{index}", 1, mlp(8, 16, index + 1))
    known = Catalog(tmp_path)
    known.scan()
    spoiled(Path(known.file), how)
    assert found(mlp(8, 16, 2), tmp_path) == "run1@1"
    assert known.scan().steps == 3
    assert ("making it again" in caplog.text) is (how != "empty")


def test_a_stale_catalogue_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step goes, or changes, between the scan and the look at its manifest."""
    save(tmp_path / "a", 1, mlp(8, 16, 4))
    save(tmp_path / "b", 1, mlp(8, 16, 16, 4))
    known = Catalog(tmp_path)
    ask = known.sharing

    def late(*words: Any) -> Any:
        answer = ask(*words)
        if (tmp_path / "b").exists():
            shutil.rmtree(tmp_path / "b")
        return answer

    monkeypatch.setattr(known, "sharing", late)
    relative = nearest(mlp(8, 16, 16, 5), known)
    assert relative is not None
    assert relative.source == f"{tmp_path / 'a'}@1"
    assert caplog.text.count("is stale") == 1


def test_what_the_catalogue_says_wrongly_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a", 1, mlp(8, 16, 4))
    save(tmp_path / "b", 1, mlp(9, 16, 4))
    known = Catalog(tmp_path)
    known.scan()
    with contextlib.closing(sqlite3.connect(known.file, isolation_level=None)) as tables:
        digests = [each.digest for each in Graph(mlp(8, 16, 4)).layers.layers]
        rows = [(digest, id) for digest in digests for (id,) in tables.execute(
            "SELECT graph FROM models WHERE run LIKE '%b'").fetchall()]  # fmt: skip
        tables.executemany("INSERT OR IGNORE INTO layers VALUES (?, ?)", rows)
        tables.execute("UPDATE steps SET created = '9999' WHERE run LIKE '%b'")
    relative = nearest(mlp(8, 16, 4), known)
    assert relative is not None
    assert relative.run.endswith("a")
    assert "is stale" in caplog.text


@pytest.mark.parametrize("tensors", [["0.weight", "0.bias", "2.bias"], ["0.weight"]])
@pytest.mark.parametrize("times", [1, 2])
def test_steps_whose_graph_lies_hide_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: list[str], times: int
) -> None:
    """Their records have the digest of a layer with other tensors, or twice. Several such steps
    were called steps that others delete."""
    monkeypatch.setattr(relatives, "LOOKS_MAX", 2)
    model = mlp(8, 16, 4)
    save(tmp_path / "honest", 1, model)
    digest = Graph(model).layers.layers[0].digest
    record = json.dumps([1, "traced", times * [["0", digest, tensors]]])
    state = {"model": mlp(8, 16, 5), "graph": {RECORD: record}}
    with statehold.Checkpointer(tmp_path / "lying", **SMALL) as ckpt:
        for step in (2, 3, 4):
            ckpt.save(step, state).wait("committed", DEADLINE_S)
    assert found(mlp(8, 16, 6), tmp_path) == "honest@1"


def test_a_step_whose_graph_is_no_text_stops_no_scan(tmp_path: Path) -> None:
    save(tmp_path / "honest", 1, mlp(8, 16, 4))
    record = json.dumps([1, "traced", [["0", "\ud800", ["0.weight"]]]])
    state = {"model": mlp(9, 16, 5), "graph": {RECORD: record}}
    with statehold.Checkpointer(tmp_path / "lying", **SMALL) as ckpt:
        ckpt.save(2, state).wait("committed", DEADLINE_S)
    assert found(mlp(8, 16, 6), tmp_path) == "honest@1"


@pytest.mark.parametrize("lowest", [True, False])
def test_a_metric_without_a_finite_value_is_no_metric(tmp_path: Path, *, lowest: bool) -> None:
    """As for Keep(best=...) and restore(best=...)."""
    best = -math.inf if lowest else math.inf
    save(tmp_path / "good", 1, mlp(8, 16, 3), {"loss": 0.5})
    save(tmp_path / "broken", 2, mlp(8, 16, 4), {"loss": best})
    assert found(mlp(8, 16, 6), tmp_path, metric="loss", lowest=lowest) == "good@1"


def test_it_ends_if_steps_go_as_fast_as_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved_again(*_: object) -> None:
        save(tmp_path / "a", 1, mlp(8, 16))

    save(tmp_path / "a", 1, mlp(8, 16))
    monkeypatch.setattr(relatives, "_layers_of", saved_again)
    monkeypatch.setattr(relatives, "LOOKS_MAX", 2)
    with pytest.raises(StepNotFoundError, match="as fast as"):
        nearest(mlp(8, 16), tmp_path)


def test_many_scan_at_once_beside_a_job(tmp_path: Path) -> None:
    """Threads stand for processes: each scan has a lock and a connection of its own."""
    save(tmp_path / "a", 1, mlp(8, 16, 4))
    model = mlp(8, 16, 5)
    with (
        statehold.Checkpointer(tmp_path / "busy", keep=1, **SMALL) as ckpt,
        ThreadPoolExecutor(4) as pool,
    ):
        told = [pool.submit(nearest, model, tmp_path) for _ in range(12)]
        for step in range(1, 9):
            ckpt.save(step, {"model": model, "graph": Graph(model)})
        answers = [each.result(DEADLINE_S) for each in told]
    assert all(each is not None and each.layers >= 1 for each in answers)
    assert found(model, tmp_path) == "busy@8"


def test_a_catalogue_that_another_process_makes_again_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted between two looks at the file."""
    model, file, looks = mlp(8, 16), tmp_path / "mine", []
    save(tmp_path / "runs" / "a", 1, model)
    known = Catalog(tmp_path / "runs", file)
    known.scan()

    def vanished(path: str, mode: str) -> Any:
        looks.append(path)
        file.unlink(missing_ok=True)
        return open(path, mode)

    monkeypatch.setattr(catalog, "open", vanished, raising=False)
    assert known.scan().unreadable == []
    assert looks == [str(file)]
    assert file.exists()


def test_nobody_sees_a_catalogue_that_is_made_again_while_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(8, 16)
    save(tmp_path / "a", 1, model)
    known = Catalog(tmp_path)
    known.scan()
    free, seen = LockFile.close, []

    def freed(lock: LockFile) -> None:
        """What the next holder of the lock finds."""
        seen.append(os.path.isfile(known.file) and counted(known))
        free(lock)

    monkeypatch.setattr(LockFile, "close", freed)
    assert known.rebuild().read == 1
    assert seen
    assert all(count == 1 for count in seen)


def counted(known: Catalog) -> int:
    """How many steps the catalogue has."""
    with contextlib.closing(sqlite3.connect(known.file)) as tables:
        return int(tables.execute("SELECT COUNT(*) FROM steps").fetchone()[0])


def test_a_scan_that_is_killed_leaves_a_good_catalogue(tmp_path: Path) -> None:
    for index in range(3):
        save(tmp_path / f"run{index}", 1, mlp(8, 16, index + 1))
    code = (
        "import os, signal, sys\n"
        "from statehold.lineage import catalog\n"
        "take, left = catalog._Scan._take, [2]\n"
        "def killed(*words):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    take(*words)\n"
        "catalog._Scan._take = killed\n"
        "catalog.Catalog(sys.argv[1]).scan()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    assert Catalog(tmp_path).scan().read == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", 1, mlp(8, 16))
    assert main(["catalog", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "1 steps of 1 runs, with 2 different graphs; 1 manifests read, 0 steps gone\n"
    )
    assert main(["catalog", str(tmp_path), "--rebuild", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["steps"], answer["read"], answer["unreadable"]) == (1, 1, [])
    assert answer["file"] == str(tmp_path / ".statehold-catalog.sqlite")
    (tmp_path / "a" / "step-000000000001" / "manifest.json").write_bytes(b"no")
    assert main(["catalog", str(tmp_path)]) == 1
    assert "a@1" in capsys.readouterr().err
    assert main(["catalog", str(tmp_path / "nowhere")]) == 3


def test_a_catalogue_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        Catalog(tmp_path / "nowhere")
    for file, kind in ((tmp_path, UsageError), (tmp_path / "nowhere" / "file", StorageError)):
        known = Catalog(tmp_path, file)
        for call in (known.scan, known.rebuild, lambda known=known: nearest(mlp(8, 16), known)):
            with pytest.raises(kind) as caught:
                call()
            assert str(file) in str(caught.value.facts)


def test_a_catalogue_that_sqlite_cannot_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", refused)
    with pytest.raises(StorageError, match="cannot use the catalogue") as caught:
        Catalog(tmp_path).scan()
    assert caught.value.facts["cause"] == "disk I/O error"


def test_a_catalogue_that_cannot_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update of the library, on a disk that is full."""
    known = Catalog(tmp_path)
    known.scan()
    spoiled(Path(known.file), "PRAGMA user_version = 99")
    connect, calls = sqlite3.connect, list[Any]()

    def full(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if len(calls) > 1:
            raise sqlite3.OperationalError("database or disk is full")
        return connect(*given, **options)

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(StorageError, match="cannot use the catalogue") as caught:
        known.scan()
    assert caught.value.facts["cause"] == "database or disk is full"
    assert len(calls) == 2


# What a name that is given for the catalogue may mean already.
OF_OTHERS = {
    "database": lambda path: sqlite3.connect(path).executescript(
        "CREATE TABLE results (name TEXT); CREATE TABLE steps (run TEXT)"
    ),
    "text": lambda path: path.write_bytes(b"damaged" * 1000),
    "short": lambda path: path.write_bytes(b"S"),
    "cut database": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(84)),
    "FIFO": os.mkfifo,
    "directory": Path.mkdir,
    "link": lambda path: (path.symlink_to(path.with_name("its file")),
                          path.with_name("its file").write_bytes(b"mine")),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_OTHERS)
def test_a_file_that_is_no_catalogue_is_refused_and_untouched(tmp_path: Path, what: str) -> None:
    save(tmp_path / "runs" / "a", 1, mlp(8, 16))
    file = tmp_path / "file"
    OF_OTHERS[what](file)

    def state() -> object:
        seen = file.lstat()  # but for the time of the last read, which state() itself changes
        kept = seen.st_mode, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns
        return sorted(os.listdir(tmp_path)), kept, file.read_bytes() if file.is_file() else None

    before = state()
    for call in (Catalog(tmp_path / "runs", file).scan, Catalog(tmp_path / "runs", file).rebuild):
        with pytest.raises(UsageError, match="no catalogue") as caught:
            call()
        assert "file" in caught.value.facts
    assert main(["catalog", str(tmp_path / "runs"), "--file", str(file), "--rebuild"]) == 2
    assert state() == before


def test_the_manifest_of_a_step_is_no_catalogue(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, mlp(8, 16))
    step = tmp_path / "a" / "step-000000000001"
    before = (step / "manifest.json").read_bytes()
    with pytest.raises(UsageError, match="no catalogue"):
        Catalog(tmp_path, step / "manifest.json").scan()
    assert (step / "manifest.json").read_bytes() == before
    assert not (step / "manifest.json.lock").exists()


@pytest.mark.parametrize(
    "how", ["torn", "zeros", "empty", "PRAGMA user_version = 99", "DROP TABLE layers"]
)
def test_a_catalogue_elsewhere_is_known_however_damaged(tmp_path: Path, how: str) -> None:
    save(tmp_path / "runs" / "a", 1, mlp(8, 16))
    known = Catalog(tmp_path / "runs", tmp_path / "mine")
    known.scan()
    spoiled(Path(known.file), how)
    assert known.scan().steps == 1


def test_a_catalogue_that_an_older_version_has_made_elsewhere(tmp_path: Path) -> None:
    """It has no application_id, but the tables."""
    save(tmp_path / "runs" / "a", 1, mlp(8, 16))
    known = Catalog(tmp_path / "runs", tmp_path / "mine")
    known.scan()
    spoiled(Path(known.file), "PRAGMA application_id = 0")
    assert known.scan().read == 0
    assert known.rebuild().read == 1


def test_a_link_to_a_catalogue_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "a", 1, mlp(8, 16))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    for act in ("scan", "rebuild"):
        assert getattr(Catalog(tmp_path / "runs", link), act)().read == 1
        assert link.is_symlink()
        assert Catalog(tmp_path / "runs", tmp_path / "mine").scan().read == 0


def test_it_needs_no_torch() -> None:
    code = "import sys; import statehold.lineage.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_tables_hold_each_graph_once(tmp_path: Path) -> None:
    for index in range(4):
        save(tmp_path / f"run{index}", 1, mlp(8, 16, 4))
    assert Catalog(tmp_path).scan().graphs == 2  # traced, and by tensors
    assert catalog.NAME in Catalog(tmp_path).file
