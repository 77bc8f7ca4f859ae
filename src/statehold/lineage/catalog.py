"""Catalog: what the runs below a directory have, in a SQLite file that can be made again any time.

A manifest is read once. It is read again if its inode, its size or its time of change differs.

Owns: the tables, and how they are brought up to date.
Invariants: manifests are the truth, and the file is a cache of them: who takes a step from it looks
at the manifest of the step, too (relatives). A file that is damaged, or of another version, is made
again, with a line in the log. A file that is no catalogue is left alone: the application_id of
SQLite tells, or the tables in a catalogue of an older version, or the name that a catalogue has by
itself. One process at a time has the file open, under a lock that the kernel
drops when its holder dies, so SQLite never meets another writer. Jobs are not disturbed: runs are
only read, and a step that cannot be read now is left to the next scan.
Not here: which step is the nearest relative (relatives), graphs (format/graphs).
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from statehold.errors import StateholdError, StorageError, UsageError, storing
from statehold.format.entries import DOCUMENT_BYTES_MAX, sha256
from statehold.format.graphs import LayerGraph, SavedModel, models_in
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME, open_step
from statehold.lineage.family import runs_below
from statehold.options.paths import absolute
from statehold.process.file_locks import LockFile
from statehold.process.warn import logger
from statehold.reading.places import file_system
from statehold.steps.shelf import DirectoryShelf

if TYPE_CHECKING:
    from statehold._core import Fs

T = TypeVar("T")

NAME = ".statehold-catalog"
_VERSION = 1
_APPLICATION = 0x53744843  # "StHC": which program has made a file of SQLite
_TABLES = [
    "CREATE TABLE steps (run TEXT, step INTEGER, stamp TEXT, manifest TEXT, created TEXT, "
    "metrics TEXT, PRIMARY KEY (run, step))",
    "CREATE TABLE models (run TEXT, step INTEGER, graph INTEGER, tensors INTEGER)",
    "CREATE INDEX models_of ON models (run, step)",
    "CREATE TABLE graphs (id INTEGER PRIMARY KEY, kind TEXT, digests TEXT UNIQUE)",
    "CREATE TABLE layers (digest TEXT, graph INTEGER, PRIMARY KEY (digest, graph)) WITHOUT ROWID",
    f"PRAGMA user_version = {_VERSION}",
    f"PRAGMA application_id = {_APPLICATION}",
]
# Of each step with a layer in common: how many, by the graph of the asked kind if it has one.
_SHARED = """
WITH shared AS (
    SELECT graph, COUNT(*) AS count FROM layers
    WHERE digest IN (SELECT digest FROM wanted) GROUP BY graph)
SELECT run, step, manifest, created, metrics, MAX(shared.count)
FROM models JOIN steps USING (run, step) LEFT JOIN graphs ON graphs.id = models.graph
JOIN shared ON shared.graph = CASE WHEN graphs.kind = ? THEN models.graph ELSE models.tensors END
GROUP BY run, step
"""


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan has found.

    Attributes:
        runs, steps, graphs: how many the catalogue has.
        read: how many manifests were read.
        gone: how many steps it had that are not there any more.
        unreadable: the steps that are left out, such as "runs/a@40".
    """

    runs: int
    steps: int
    graphs: int
    read: int
    gone: int
    unreadable: Sequence[str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that shares `layers` layers with a model. manifest: the sha256 of its manifest."""

    run: str
    step: int
    manifest: str
    created: str
    metrics: Mapping[str, float]
    layers: int


class Catalog:
    """The steps of the runs below a directory, for lineage.nearest().

    Any number of processes may use it at once.

    Args:
        directory: the runs below it are read.
        file: where the catalogue is kept; it may be deleted at any time. None: in the directory.

    Raises:
        UsageError: there is no such directory, or the file is no catalogue.
        StorageError: the file cannot be written.
    """

    def __init__(
        self, directory: str | os.PathLike[str], file: str | os.PathLike[str] | None = None
    ) -> None:
        self.directory = absolute(directory, "the directory")
        if not os.path.isdir(self.directory):
            raise UsageError("no such directory", facts={"directory": self.directory})
        default = os.path.join(self.directory, f"{NAME}.sqlite")
        named = default if file is None else absolute(file, "the catalogue")
        self.file = os.path.realpath(named) if os.path.islink(named) else named

    def scan(self) -> Scanned:
        """Bring the catalogue up to date with the manifests."""
        return self._with(self._scan)

    def rebuild(self) -> Scanned:
        """Make the catalogue again from nothing."""
        return self._with(self._scan, anew=True)

    def sharing(self, kind: str, digests: Sequence[str]) -> list[Candidate]:
        """The steps that share a layer with a model, as the last scan has found them.

        Args:
            kind: the kind of the model's own graph.
            digests: the digests of the model's graphs.
        """

        def ask(tables: sqlite3.Connection) -> list[tuple[str, int, str, str, str, int]]:
            tables.execute("CREATE TEMP TABLE wanted (digest TEXT)")
            tables.executemany("INSERT INTO wanted VALUES (?)", [(each,) for each in digests])
            return tables.execute(_SHARED, (kind,)).fetchall()

        return [
            Candidate(run, step, manifest, created, json.loads(metrics), layers)
            for run, step, manifest, created, metrics, layers in self._with(ask)
        ]

    def __repr__(self) -> str:
        return f"<Catalog of {self.directory}>"

    # -- the file --------------------------------------------------------------------------

    def _with(self, act: Callable[[sqlite3.Connection], T], *, anew: bool = False) -> T:
        """The result of `act` in one transaction; a catalogue that is damaged is made again.

        The lock is held from the deletion to the end of the scan, so nobody sees it empty.
        """
        with storing("use the catalogue", self.file), self._locked():
            if anew:
                self._delete()
            try:
                try:
                    return self._once(act)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
                        raise
                    logger.warning(
                        "the catalogue %s is damaged or of another version (%s); making it again",
                        self.file, error,
                    )  # fmt: skip
                self._delete()
                self._once(self._scan)
                return self._once(act)
            except sqlite3.Error as error:
                facts, what = {"cause": str(error)}, "cannot use the catalogue; runs are safe"
                raise StorageError(what, path=self.file, facts=facts) from error

    def _once(self, act: Callable[[sqlite3.Connection], T]) -> T:
        # The lock keeps others out. SQLite's own fails on a file system without locks.
        file = f"{Path(self.file).absolute().as_uri()}?vfs=unix-none"
        with contextlib.closing(sqlite3.connect(file, isolation_level=None, uri=True)) as tables:
            (version,) = tables.execute("PRAGMA user_version").fetchone()
            is_new = not tables.execute("SELECT 1 FROM sqlite_master").fetchone()
            if not is_new and version != _VERSION:
                raise sqlite3.DatabaseError(f"version {version}")
            if (found := tables.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
                raise sqlite3.DatabaseError(str(found[0]))
            tables.execute("BEGIN IMMEDIATE")
            for statement in _TABLES if is_new else ():
                tables.execute(statement)
            result = act(tables)
            tables.execute("COMMIT")
            return result

    def _scan(self, tables: sqlite3.Connection) -> Scanned:
        return _Scan(tables, self.directory).run()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not _may_be_replaced(self.file):  # not even a lock is made beside it
            facts = {"file": self.file, "expected": "a catalogue, an empty file, or none"}
            hint = "give another name; a catalogue whose beginning is damaged can be deleted"
            raise UsageError("this file is no catalogue", facts=facts, hint=hint)
        with contextlib.closing(LockFile(f"{self.file}.lock")) as lock:
            lock.take(0)
            yield

    def _delete(self) -> None:
        for suffix in ("", "-journal"):
            Path(f"{self.file}{suffix}").unlink(missing_ok=True)


def _may_be_replaced(file: str) -> bool:
    """Whether a file is not there, or is empty, or a catalogue of any version, damaged or not."""
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            return False
        if not found.st_size or os.path.basename(file) == f"{NAME}.sqlite":
            return True
        with open(file, "rb") as raw:
            head = raw.read(72)
    except FileNotFoundError:  # perhaps because another process is making it again
        return True
    if head[:16] == b"SQLite format 3\0" and head[68:] == _APPLICATION.to_bytes(4, "big"):
        return True
    uri, damage = f"{Path(file).as_uri()}?mode=ro&immutable=1", sqlite3.DatabaseError
    with contextlib.suppress(damage), contextlib.closing(sqlite3.connect(uri, uri=True)) as tables:
        made = {sql for (sql,) in tables.execute("SELECT sql FROM sqlite_master")}
        return made.issuperset(each for each in _TABLES if each.startswith("CREATE"))
    return False


def _is_damage(error: sqlite3.OperationalError) -> bool:
    """Whether tables are missing, which SQLite takes for a mistake in the query."""
    return str(error).startswith(("no such table", "no such column"))


class _Scan:
    """One comparison of the tables with the manifests."""

    def __init__(self, tables: sqlite3.Connection, directory: str) -> None:
        self._tables = tables
        self._directory = directory
        self._read = 0
        self._unreadable: list[str] = []

    def run(self) -> Scanned:
        rows = self._tables.execute("SELECT run, step, stamp FROM steps").fetchall()
        known = {(run, step): stamp for run, step, stamp in rows}
        with contextlib.closing(file_system()) as fs:
            found = dict(self._stamps(fs))
            for (run, step), stamp in found.items():
                if known.get((run, step)) != stamp:
                    self._take(fs, run, step, stamp)
        gone = known.keys() - found.keys()
        for run, step in gone:
            self._forget(run, step)
        self._tables.execute(
            "DELETE FROM graphs WHERE id NOT IN "
            "(SELECT graph FROM models WHERE graph IS NOT NULL UNION SELECT tensors FROM models)"
        )
        self._tables.execute("DELETE FROM layers WHERE graph NOT IN (SELECT id FROM graphs)")
        return self._scanned(len(gone))

    def _scanned(self, gone: int) -> Scanned:
        count = "SELECT COUNT(DISTINCT run), COUNT(*), (SELECT COUNT(*) FROM graphs) FROM steps"
        runs, steps, graphs = self._tables.execute(count).fetchone()
        return Scanned(runs, steps, graphs, self._read, gone, self._unreadable)

    def _stamps(self, fs: Fs) -> Iterator[tuple[tuple[str, int], str]]:
        """What tells one save of each step from another."""
        for run in runs_below(self._directory):
            store = DirectoryShelf(fs, run)
            steps: list[int] = []
            with contextlib.suppress(StateholdError):  # the run was deleted meanwhile
                steps = store.steps()
            for step in steps:
                with contextlib.suppress(OSError):
                    found = os.stat(f"{store.where(step)}/{MANIFEST_NAME}")
                    yield (run, step), f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    def _take(self, fs: Fs, run: str, step: int, stamp: str) -> None:
        self._forget(run, step)
        directory = DirectoryShelf(fs, run).where(step)
        path = f"{directory}/{MANIFEST_NAME}"
        try:
            raw = fs.read_file(path, DOCUMENT_BYTES_MAX)
            manifest = Manifest.decode(raw, path)
            models = models_in(open_step(fs.read_file, directory, step, 0, 0))
        except StateholdError as error:
            logger.warning("the catalogue leaves out step %d of %s\n%s", step, run, error)
            self._unreadable.append(f"{run}@{step}")
            return
        metrics = json.dumps(dict(manifest.about.metrics))
        row = run, step, stamp, sha256(raw), manifest.created, metrics
        self._tables.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", row)
        self._read += 1
        for model in models:
            self._tables.execute(
                "INSERT INTO models VALUES (?, ?, ?, ?)", (run, step, *self._graphs_of(model))
            )

    def _graphs_of(self, model: SavedModel) -> tuple[int | None, int]:
        graph = None if model.graph is None else self._graph(model.graph)
        return graph, self._graph(model.by_tensors)

    def _graph(self, graph: LayerGraph) -> int:
        """The number of a graph, which many steps have."""
        digests = [each.digest for each in graph.layers]
        key = sha256(json.dumps([graph.kind, digests]).encode())
        row = self._tables.execute("SELECT id FROM graphs WHERE digests = ?", (key,)).fetchone()
        if row is not None:
            return int(row[0])
        made = self._tables.execute(
            "INSERT INTO graphs (kind, digests) VALUES (?, ?)", (graph.kind, key)
        )
        rows = [(digest, made.lastrowid) for digest in dict.fromkeys(digests)]
        self._tables.executemany("INSERT INTO layers VALUES (?, ?)", rows)
        return int(made.lastrowid or 0)

    def _forget(self, run: str, step: int) -> None:
        for table in ("steps", "models"):
            self._tables.execute(f"DELETE FROM {table} WHERE run = ? AND step = ?", (run, step))
