"""A whole step compared with its manifest: documents, files, headers, pieces, and completeness.

Owns: which findings count as damage, and their place: file, bytes, tensor, rank; the reading of
every byte of a step at the speed of the device.
Invariants: the check never stops at a finding, and reading continues after a bad piece. Of several
ranks, one record is in memory at a time, so memory grows with tensors, and with boxes only if a
planner cut freely. Adjacent damage of one tensor is one finding, so a file full of damage is still
a short list.
Not here: which step (places), the output (verify).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from statehold import _core
from statehold._core import Fs, ReadJob
from statehold.encoding import header
from statehold.errors import CorruptionError, StateholdError, some
from statehold.format.entries import Chunk
from statehold.format.manifest import Commit, Manifest, groups_of
from statehold.format.record import Record
from statehold.format.saved import MANIFEST_NAME, read_record
from statehold.io.clients import open_engine
from statehold.io.segments import ReadSegments, start_read
from statehold.layout.layout import Box, ExplicitLayout
from statehold.layout.ranges import summed_pieces, sums_between
from statehold.reading.places import StepPlace, load_manifest
from statehold.steps.copying import DataFile, data_files
from statehold.units import MiB

# -- the check of a step ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. Half-open `begin`, `end` in the file, if the finding is about bytes.

    what: "manifest", "record", "missing", "size", "header", "checksum", "unreadable" or "cover".
    """

    what: str
    file: str | None = None
    begin: int | None = None
    end: int | None = None
    tensor: str | None = None
    rank: int | None = None
    pieces: int = 0
    expected: str | None = None
    got: str | None = None
    detail: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class CheckReport:
    """What was checked, and the findings."""

    place: StepPlace
    files: int = 0
    bytes: int = 0
    pieces: int = 0
    world_size: int = 0
    findings: list[Finding] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of tensors
    elsewhere: list[int] = field(default_factory=list)  # ranks whose files other hosts have

    @property
    def is_intact(self) -> bool:
        return not self.findings

    def add(self, finding: Finding) -> None:
        last = self.findings[-1] if self.findings else None
        if last is not None and _goes_on(last, finding):
            joined = {**asdict(last), "end": finding.end, "pieces": last.pieces + finding.pieces}
            self.findings[-1] = Finding(**joined)
        else:
            self.findings.append(finding)


def _goes_on(last: Finding, finding: Finding) -> bool:
    about = [(f.what, f.file, f.tensor, f.rank, f.detail) for f in (last, finding)]
    return finding.pieces > 0 and about[0] == about[1] and last.end == finding.begin


def check_step(
    fs: Fs, place: StepPlace, reader: SpanReader, done: Callable[[int], None] = lambda _: None
) -> CheckReport:
    """Check every byte of a step. `done` gets the number of bytes checked since its last call."""
    return _Check(fs, place, reader, done).run()


@dataclass(frozen=True, slots=True)
class _Document:
    """What one document, a manifest of version 1 or a record, says about data files."""

    rank: int
    files: tuple[DataFile, ...]
    dtypes: Mapping[str, str]


class _Check:
    def __init__(
        self, fs: Fs, place: StepPlace, reader: SpanReader, done: Callable[[int], None]
    ) -> None:
        self.fs = fs
        self.place = place
        self.reader = reader
        self.done = done
        self.report = CheckReport(place)
        self.known = {MANIFEST_NAME}
        self.cover = _Cover()

    def run(self) -> CheckReport:
        report = self.report
        try:
            manifest = load_manifest(self.fs, self.place.directory)
        except CorruptionError as error:
            report.add(self._unsound("manifest", f"{self.place.directory}/{MANIFEST_NAME}", error))
            return report
        report.world_size = manifest.world_size
        if manifest.step != self.place.step:
            expected, got = str(self.place.step), str(manifest.step)
            report.add(Finding("manifest", MANIFEST_NAME, expected=expected, got=got,
                               detail="it belongs to another step"))  # fmt: skip
        for bad in self.reader.bad_pieces(self._spans(self._parts(manifest)), self.done):
            report.add(_bad(bad))
        for finding in self.cover.findings():
            report.add(finding)
        report.foreign = sorted(self._names() - self.known)
        return report

    def _names(self) -> set[str]:
        """The contents of the directory; nothing if the step was retired meanwhile."""
        is_there = self.fs.is_dir(self.place.directory)
        return {name for name, _ in self.fs.listdir(self.place.directory)} if is_there else set()

    def _unsound(
        self, what: str, path: str, error: StateholdError, rank: int | None = None
    ) -> Finding:
        """A finding for an error about a whole document."""
        facts = {key: str(value) for key, value in error.facts.items()}
        where = facts.get("where")
        detail = f"{error.summary} ({where})" if where else error.summary
        return Finding(what, os.path.basename(path), rank=rank, expected=facts.get("expected"),
                       got=facts.get("got"), detail=detail)  # fmt: skip

    # -- documents ---------------------------------------------------------------------------

    def _parts(self, manifest: Manifest | Commit) -> Iterator[_Document]:
        if isinstance(manifest, Manifest):
            chunks = {name: entry.chunks for name, entry in manifest.tensors.items()}
            dtypes = {name: entry.dtype for name, entry in manifest.tensors.items()}
            yield _Document(0, data_files(manifest.files, chunks, manifest.block_bytes), dtypes)
            return
        digests: list[dict[str, str]] = []
        for rank in range(manifest.world_size):
            record = self._record(manifest, rank)
            if record is not None:
                digests.append(record.group_digests())
                self.cover.add(record)
                dtypes = {name: record.tensors[name].dtype for name in record.chunks}
                files = data_files(record.files, record.chunks, record.block_bytes)
                yield _Document(rank, files, dtypes)
        if len(digests) < manifest.world_size:
            self.cover.is_complete = False  # missing files have been reported
        elif groups_of(digests) != dict(manifest.state):
            detail = "its groups of ranks differ from those of the records"
            self.report.add(Finding("manifest", MANIFEST_NAME, detail=detail))

    def _record(self, commit: Commit, rank: int) -> Record | None:
        path = f"{self.place.directory}/{commit.records[rank].name}"
        self.known.add(commit.records[rank].name)
        try:
            return read_record(self.fs.read_file, self.place.directory, commit, rank)
        except StateholdError as error:
            # Its data files cannot be judged without it, but that does not make them foreign.
            stem = commit.records[rank].name.removesuffix(".json")
            beside = {name for name in self._names() if name.startswith(stem)}
            self.known |= beside
            if self.place.is_part and not beside:
                self.report.elsewhere.append(rank)
                return None
            what = "missing" if self.fs.stat_bytes(path) is None else "record"
            self.report.add(self._unsound(what, path, error, rank))
            return None

    # -- files -------------------------------------------------------------------------------

    def _spans(self, parts: Iterable[_Document]) -> Iterator[ScannedSpan]:
        """The spans to read, file after file; reports problems of the files on the way."""
        for part in parts:
            self.report.names.update(part.dtypes)
            for file in part.files:
                self.known.add(file.name)
                yield from self._file_spans(part, file)

    def _file_spans(self, part: _Document, file: DataFile) -> Iterator[ScannedSpan]:
        path = f"{self.place.directory}/{file.name}"
        size = self.fs.stat_bytes(path)
        self.report.files += 1
        if size is None:
            self.report.add(Finding("missing", file.name, rank=part.rank, detail=_listed(file)))
            return
        if size != file.bytes:
            self.report.add(Finding("size", file.name, rank=part.rank, expected=f"{file.bytes}",
                                    got=f"{size}", detail="bytes"))  # fmt: skip
        for each in file.spans:
            if each.begin == each.end:
                continue
            span = ScannedSpan(
                path, size, each.begin, each.end, each.sums, file.block_bytes, each.name, part.rank
            )
            self.report.bytes += each.end - each.begin
            self.report.pieces += len(each.sums) // 16
            if not each.name and each.end <= size:
                yield from self._check_header(span, part, file)
            elif each.end <= size:
                yield span
            else:
                yield from self._cut_off(span)

    def _cut_off(self, span: ScannedSpan) -> Iterator[ScannedSpan]:
        """For a span that a short file cuts off: the pieces that exist."""
        whole = span.begin
        for begin, end, _ in span.pieces():
            if end <= span.file_bytes:
                whole = end
            else:
                detail = "the file ends before it"
                self.report.add(_about(span, "unreadable", begin, end, detail))
        if whole > span.begin:
            yield span.part(span.begin, whole)

    # -- headers -----------------------------------------------------------------------------

    def _check_header(
        self, span: ScannedSpan, part: _Document, file: DataFile
    ) -> Iterator[ScannedSpan]:
        """Check that a header agrees with the manifest or the record about the same bytes."""
        bad = list(scan(span))
        for each in bad:
            self.report.add(_bad(each))
        if bad:
            return
        yield span
        with open(span.path, "rb") as stream:
            raw = stream.read(span.end)
        try:
            entries, _, data_begin = header.decode(raw, file.bytes, file.name)
        except CorruptionError as error:
            self.report.add(self._unsound("header", file.name, error, part.rank))
            return
        base = data_begin
        says = {
            entry.name: (entry.dtype, entry.begin + base, entry.end + base) for entry in entries
        }
        expected = {
            each.name: (part.dtypes[each.name], each.begin, each.end) for each in file.spans[1:]
        }
        for name in sorted(says.keys() | expected.keys()):
            if says.get(name) != expected.get(name):
                self.report.add(Finding("header", file.name, tensor=name, rank=part.rank,
                                        expected=str(expected.get(name, "nothing")),
                                        got=str(says.get(name, "nothing")),
                                        detail="not what the manifest says"))  # fmt: skip


class _Cover:
    """Whether the chunks of all ranks make the whole tensor, counted in elements.

    A record holds exactly the boxes that its layout makes a rank write, so chunks of one layout do
    not overlap. Boxes that a planner chose freely might overlap, which a count alone does not show.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._wrote: dict[object, int] = {}
        self._boxes: dict[object, set[Box]] = {}
        self._shapes: dict[object, tuple[str, tuple[int, ...]]] = {}

    def add(self, record: Record) -> None:
        for held in record.held:
            if held.layout is None:
                continue  # whole, in the record itself
            key: object = held
            chunks = record.chunks.get(held.name, ())
            if isinstance(held.layout, ExplicitLayout):
                key = held.name, held.dtype, held.shape  # a rank may know only its own boxes
                chunks = tuple(chunk for chunk in chunks if self._is_new(key, chunk))
            numel = sum(chunk.box.numel for chunk in chunks)
            self._wrote[key] = self._wrote.get(key, 0) + numel
            self._shapes[key] = held.name, held.shape

    def _is_new(self, key: object, chunk: Chunk) -> bool:
        """Without collectives several ranks may write the same box; any of them can be read."""
        boxes = self._boxes.setdefault(key, set())
        is_new = chunk.box not in boxes
        boxes.add(chunk.box)
        return is_new

    def findings(self) -> Iterator[Finding]:
        """Nothing if records were missing, because that is the reason, and has been reported."""
        for key, numel in self._wrote.items():
            name, shape = self._shapes[key]
            if self.is_complete and numel != math.prod(shape):
                yield Finding("cover", tensor=name, expected=f"{math.prod(shape)}",
                              got=f"{numel}", detail="elements in all chunks")  # fmt: skip


def _about(span: ScannedSpan, what: str, begin: int, end: int, detail: str) -> Finding:
    name = os.path.basename(span.path)
    tensor = span.name or None
    return Finding(what, name, begin, end, tensor, span.rank, pieces=1, detail=detail)


def _bad(bad: BadPiece) -> Finding:
    name = os.path.basename(bad.span.path)
    what = "unreadable" if bad.got is None else "checksum"
    tensor, rank = bad.span.name or None, bad.span.rank
    detail = bad.why or ("" if tensor else "the header")
    return Finding(what, name, bad.begin, bad.end, tensor, rank, 1, bad.expected, bad.got, detail)


def _listed(file: DataFile) -> str:
    return some([span.name for span in file.spans[1:]], 4)


# -- reading at the speed of the device ------------------------------------------------------------
# The engine reads batches of spans, a few of them in flight. A batch that failed gets a second
# look, piece by piece. Memory is the engine's buffers and a few batches, however large the step is.
# The page cache of a file is dropped first, so the bytes come from the device.


BUFFER_BYTES = 16 * MiB
BUFFERS = 24
QUEUE_DEPTH = 32
BATCH_BYTES = 256 * MiB
BATCH_FILES = 64
BATCHES = 3
_WAIT_S = 0.1  # between two looks at the progress, and at an interrupt


@dataclass(frozen=True, slots=True)
class ScannedSpan:
    """The bytes [begin, end) of a file, which belong to one tensor (`name`), or to the header ("").

    `sums` has those of its pieces on the grid of `block_bytes`. The file has at least `end` bytes.
    """

    path: str
    file_bytes: int
    begin: int
    end: int
    sums: str
    block_bytes: int
    name: str
    rank: int

    def pieces(self) -> Iterator[tuple[int, int, str]]:
        """(begin, end, sum) of each piece."""
        return summed_pieces(self.begin, self.end, self.sums, self.block_bytes)

    def part(self, begin: int, end: int) -> ScannedSpan:
        """The part in [begin, end), which must not cut a piece."""
        low, high = max(begin, self.begin), min(end, self.end)
        sums = sums_between(low, high, self.begin, self.sums, self.block_bytes)
        return replace(self, begin=low, end=high, sums=sums)


@dataclass(frozen=True, slots=True)
class BadPiece:
    """A piece that differs from what was committed.

    got: its checksum, or None if it cannot be read; `why` is then the reason.
    """

    span: ScannedSpan
    begin: int
    end: int
    expected: str
    got: str | None
    why: str = ""


def scan(span: ScannedSpan) -> Iterator[BadPiece]:
    """The bad pieces of one span, read one after the other."""
    return (bad for _, bad in scan_bytes(span) if bad is not None)


def scan_bytes(span: ScannedSpan) -> Iterator[tuple[bytes, BadPiece | None]]:
    """The bytes of each piece, and its problem."""
    try:
        fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        for begin, end, expected in span.pieces():
            yield b"", BadPiece(span, begin, end, expected, None, why)
        return
    try:
        for begin, end, expected in span.pieces():
            yield _look(fd, span, begin, end, expected)
    finally:
        os.close(fd)


def _look(
    fd: int, span: ScannedSpan, begin: int, end: int, expected: str
) -> tuple[bytes, BadPiece | None]:
    try:
        data = os.pread(fd, end - begin, begin)  # a regular file is short only at its end
    except OSError as error:
        return b"", BadPiece(span, begin, end, expected, None, os.strerror(error.errno or 0))
    if len(data) < end - begin:
        return data, BadPiece(span, begin, end, expected, None, "the file ends before it")
    got = f"{_core.xxh3_64(data):016x}"
    return data, None if got == expected else BadPiece(span, begin, end, expected, got)


class SpanReader:
    """Reads spans through an engine of its own. Not thread-safe; a context manager."""

    def __init__(self) -> None:
        self._fs = _core.open_fs("auto", QUEUE_DEPTH)
        threads = max(1, min(4, len(os.sched_getaffinity(0))))
        self._engine = open_engine(self._fs, BUFFERS * BUFFER_BYTES, BUFFER_BYTES, threads)
        self._dropped = ""  # the file whose cached pages were dropped last

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._fs.close()

    def bad_pieces(
        self, spans: Iterable[ScannedSpan], done: Callable[[int], None]
    ) -> Iterator[BadPiece]:
        """The bad pieces of `spans`, which are sorted by begin within a file.

        done: gets the number of newly checked bytes, from time to time 0.
        """
        under_way: deque[tuple[list[ScannedSpan], ReadJob | None]] = deque()
        try:
            for batch in _batches(spans):
                under_way.append((batch, self._start(batch)))
                if len(under_way) == BATCHES:
                    yield from self._finish(*under_way.popleft(), done)
            while under_way:
                yield from self._finish(*under_way.popleft(), done)
        finally:
            for _, job in under_way:
                if job is not None:
                    job.cancel()

    def _start(self, batch: list[ScannedSpan]) -> ReadJob | None:
        files = {span.path: span.file_bytes for span in batch}
        numbers = {path: number for number, path in enumerate(files)}
        self._drop_caches(files)
        segments = ReadSegments()
        for span in batch:
            segments.add(numbers[span.path], span.begin, span.end, span.sums, span.name)
        try:
            return start_read(self._engine, files, segments, batch[0].block_bytes).job
        except StateholdError:
            return None  # the second look finds the file and the problem

    def _drop_caches(self, paths: Iterable[str]) -> None:
        for path in paths:
            if path == self._dropped:
                continue
            self._dropped = path
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # the read will report it
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _finish(
        self, batch: list[ScannedSpan], job: ReadJob | None, done: Callable[[int], None]
    ) -> Iterator[BadPiece]:
        if not self._is_good(job, done):
            for span in batch:
                yield from scan(span)
                done(0)
        done(sum(span.end - span.begin for span in batch))

    def _is_good(self, job: ReadJob | None, done: Callable[[int], None]) -> bool:
        if job is None:
            return False
        try:
            while not job.wait(_WAIT_S):
                done(0)
            return True
        except (_core.Mismatch, StateholdError):
            return False
        finally:
            job.cancel()


def _batches(spans: Iterable[ScannedSpan]) -> Iterator[list[ScannedSpan]]:
    """Groups of spans for one job each.

    They are cut at the end of a window of BATCH_BYTES of a file, so that the engine's buffers are
    full. Small windows are read together.
    """
    batch: list[ScannedSpan] = []
    size, files = 0, set[str]()
    window: object = None
    for part in (part for span in spans for part in _cut(span)):
        here = part.path, part.begin // BATCH_BYTES
        is_enough = size >= BATCH_BYTES // 2 or len(files) == BATCH_FILES
        if batch and here != window and (is_enough or batch[0].block_bytes != part.block_bytes):
            yield batch
            batch, size, files = [], 0, set()
        window = here
        batch.append(part)
        size += part.end - part.begin
        files.add(part.path)
    if batch:
        yield batch


def _cut(span: ScannedSpan) -> Iterator[ScannedSpan]:
    at = span.begin
    while at < span.end:
        stop = min(span.end, (at // BATCH_BYTES + 1) * BATCH_BYTES)
        yield span.part(at, stop)
        at = stop
