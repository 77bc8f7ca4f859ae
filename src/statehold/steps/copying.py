"""One rank's part of a committed step, copied from one place to another and verified on the way.

Owns: the definition of a part (data files, cut into segments with checksums, and documents), and
the two ways of a data file: through the engine into a file, or as a sequence of blocks to a caller;
which files of a step a level has already.
Invariants: a copy that differs from the committed step in one byte ends with ChecksumError, before
the step is published there. Nothing is unpacked: every level has the same files and documents. Both
ways read block by block, so memory does not grow with the file.
Not here: which step goes where and when (promoting), the commit of the target (target).
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import ChecksumError, CorruptionError, StateholdError, StorageError
from statehold.format.entries import Chunk, FileEntry
from statehold.format.manifest import Manifest, record_name
from statehold.format.record import Record
from statehold.format.saved import MANIFEST_NAME, read_record
from statehold.io.clients import Client
from statehold.layout.plan import file_of
from statehold.layout.ranges import summed_pieces

if TYPE_CHECKING:
    from statehold._core import Engine, Fill, WriteJob
    from statehold.checkpoint.telemetry.watch import CopyWatch
    from statehold.steps.shelf import Shelf, ShelfFile
    from statehold.steps.store import Store


# -- the part of a rank ----------------------------------------------------------------------------
# The number of ranks may differ between save and copy: together they copy all of the step, each
# file once.

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The bytes [begin, end) of a file; they belong to tensor `name`, or to the header ("")."""

    begin: int
    end: int
    sums: str
    name: str


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file of a step; its spans tile it, the header first."""

    name: str
    bytes: int
    block_bytes: int
    spans: tuple[FileSpan, ...]


@dataclass(frozen=True, slots=True)
class CopyPart:
    """The part that a rank has to copy of a step: data files, and records (name, content), if any.

    `manifest` is the same on all ranks.
    """

    files: tuple[DataFile, ...]
    records: tuple[tuple[str, bytes], ...]
    manifest: bytes

    @property
    def nbytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Copy:
    """A rank's part of a step on its way from `source` to a target.

    There it is `attempt`. before: called with a number of bytes before they are moved;
    it may wait, or raise. watch: gets each file. near: the directory of the source, if its files
    get second names where the file system gives them.
    """

    step: int
    attempt: str | None
    part: CopyPart
    source: Shelf
    before: Callable[[int], None]
    watch: CopyWatch
    near: str | None = None

    @contextlib.contextmanager
    def blocks(self, file: DataFile) -> Iterator[Iterator[memoryview]]:
        """A data file of the part, block by block and verified, while it is copied.

        It is taken from its place if that is memory, and otherwise from blocks().
        """
        with contextlib.ExitStack() as opened:
            view = self._view(file)
            if view is None:
                yield blocks(file, opened.enter_context(self.opened(file)))
                return
            opened.callback(view.close)
            opened.enter_context(self.watch.file(file.name, file.bytes))
            yield viewed_blocks(file, view)

    def _view(self, file: DataFile) -> _core.File | None:
        # It may not be in memory, or be damaged. The code that reads it instead finds out.
        with contextlib.suppress(StorageError, CorruptionError):
            return self.source.open_view(self.step, file.name, file.bytes)
        return None

    @contextlib.contextmanager
    def opened(self, file: DataFile) -> Iterator[ShelfFile]:
        """A data file of the part, at its source, while it is copied."""
        with (
            contextlib.closing(self.source.open_file(self.step, file.name)) as found,
            self.watch.file(file.name, file.bytes),
        ):
            yield _Watched(found, self.watch)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A source that counts the time of its reads."""

    source: ShelfFile
    watch: CopyWatch

    def read_into(self, memory: memoryview, offset: int) -> None:
        self.watch.reading(lambda: self.source.read_into(memory, offset))

    def close(self) -> None:
        self.source.close()


def part_of(source: Shelf, step: int, share: Callable[[int, bytes], Collection[int]]) -> CopyPart:
    """The part of a step to copy: the files of the ranks in `share`, which gets the number of all
    ranks that have saved, and the manifest.

    Raises as reading a step does.
    """
    raw, where = source.manifest(step), source.path(step)
    manifest = Manifest.decode(raw, f"{where}/{MANIFEST_NAME}")
    if isinstance(manifest, Manifest):
        chunks = {name: entry.chunks for name, entry in manifest.tensors.items()}
        files = data_files(manifest.files, chunks, manifest.block_bytes)
        return CopyPart(files if 0 in share(1, raw) else (), (), raw)
    files, records = (), []
    for writer in share(manifest.world_size, raw):
        documents: dict[str, bytes] = {}

        def read(path: str, max_bytes: int, kept: dict[str, bytes] = documents) -> bytes:
            name = path.rpartition("/")[2]
            return kept.setdefault(name, source.read(step, name, max_bytes))

        record: Record = read_record(read, where, manifest, writer)
        files += data_files(record.files, record.chunks, record.block_bytes)
        name = record_name(writer, manifest.world_size)
        records.append((name, documents[name]))
    return CopyPart(files, tuple(records), raw)


def data_files(
    entries: Sequence[FileEntry], chunks: Mapping[str, tuple[Chunk, ...]], block_bytes: int
) -> tuple[DataFile, ...]:
    """The data files of a document."""
    spans = [[FileSpan(0, entry.data_begin, entry.header_sums, "")] for entry in entries]
    for name, found in chunks.items():
        for chunk in found:
            spans[chunk.file].append(FileSpan(chunk.begin, chunk.end, chunk.sums, name))
    return tuple(
        DataFile(entry.name, entry.bytes, block_bytes, tuple(sorted(each, key=_order)))
        for entry, each in zip(entries, spans, strict=True)
    )


def _order(span: FileSpan) -> tuple[int, int]:
    return span.begin, span.end


# -- through the engine ----------------------------------------------------------------------------


def write_copy(
    engine: Engine,
    file: DataFile,
    source: ShelfFile,
    target: _core.File,
    before: Callable[[int], None],
    there: ShelfFile | None = None,
) -> None:
    """D1 and D2 of a data file: copy it from `source` into `target`, durably.

    before: called with a number of bytes before they are copied; it may wait, or raise to stop.
    there: `target`, opened for reading, if an earlier copy has left it. Its good blocks are
        verified and kept.
    """
    left = Left(file, there) if there is not None else None
    before(file.spans[0].end)
    header = bytearray(file.spans[0].end)
    source.read_into(memoryview(header), 0)
    job = _start(engine, file, bytes(header))
    try:
        job.attach(target)
        while (fill := job.next_fill(None)) is not None:
            _fill(job, fill, file, source, before, left)
        job.wait_written(None)
        _compare(file, job.checksums())
        job.finish()
    finally:
        job.cancel()


def _start(engine: Engine, file: DataFile, header: bytes) -> WriteJob:
    data = file.spans[1:]
    return engine.write(
        file_bytes=file.bytes,
        block_bytes=file.block_bytes,
        begins=array("q", [span.begin for span in data]),
        sizes=array("q", [span.end - span.begin for span in data]),
        addresses=array("Q", [0] * len(data)),
        flags=bytes([_core.SEGMENT_EXTERNAL] * len(data)),
        strided={},
        header=header,
        owner=None,  # all of it comes through fills
        client=Client.PROMOTION,
    )


def _fill(
    job: WriteJob,
    fill: Fill,
    file: DataFile,
    source: ShelfFile,
    before: Callable[[int], None],
    left: Left | None,
) -> None:
    """Read one buffer of the file, and give the buffer back whatever happens."""
    is_there = False
    try:
        begin, end, at = _extent(file, fill)
        before(end - begin)
        memory = fill.view[at : at + end - begin]
        # The first block also has the header, which the engine handles.
        is_there = not at and left is not None and left.read_into(memory, begin)
        if not is_there:
            source.read_into(memory, begin)
    except BaseException:
        job.cancel()
        raise
    finally:
        job.filled(fill, is_there=is_there)


def _extent(file: DataFile, fill: Fill) -> tuple[int, int, int]:
    """The range of the file that a buffer wants, and its offset in the buffer.

    The data of a file has no gaps, so the pieces of a buffer are one range.
    """
    first, last = fill.pieces[0], fill.pieces[-1]
    begin = file.spans[first[0]].begin + first[1]
    end = file.spans[last[0]].begin + last[1] + last[3]
    return begin, end, first[2]


def _compare(file: DataFile, sums: bytes) -> None:
    """Compare the engine's checksums of all pieces, in file order, with the committed ones."""
    got = array("Q", sums)
    at = 0
    for span in file.spans:
        for begin, end, expected in _expected(file, span):
            if got[at] != expected:
                raise _mismatch(file, span, (begin, end), expected, got[at])
            at += 1


def _expected(file: DataFile, span: FileSpan) -> Iterator[tuple[int, int, int]]:
    """(begin, end, checksum) of each piece of a span."""
    for begin, end, digits in summed_pieces(span.begin, span.end, span.sums, file.block_bytes):
        yield begin, end, int(digits, 16)


def _mismatch(
    file: DataFile, span: FileSpan, where: tuple[int, int], expected: int, got: int
) -> ChecksumError:
    return ChecksumError(
        "bytes that were read for a copy do not match their checksum",
        facts={
            "tensor": span.name or "none: the header of the file",
            "file": file.name,
            "bytes": f"[{where[0]}, {where[1]})",
            "xxh3-64": f"expected {expected:016x}, got {got:016x}",
        },
    )


class Left:
    """The part of a file that an earlier copy has left.

    It is not trusted: a block counts only if every piece of it has its checksum.
    """

    def __init__(self, file: DataFile, there: ShelfFile) -> None:
        self._there = there
        self._sums = {
            begin: (end, expected)
            for span in file.spans
            for begin, end, expected in _expected(file, span)
        }

    def read_into(self, memory: memoryview, begin: int) -> bool:
        """Read from `begin` on; False if the bytes are not the expected ones."""
        try:
            self._there.read_into(memory, begin)
        except StateholdError:  # cut, or not readable: the source has it
            return False
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        at = begin
        while at < begin + len(memory):
            end, expected = self._sums.get(at, (at, 0))
            if not at < end <= begin + len(memory):
                return False
            if _core.hash_memory(address + at - begin, end - at) != expected:
                return False
            at = end
        return True


# -- as blocks -------------------------------------------------------------------------------------


def blocks(file: DataFile, source: ShelfFile) -> Iterator[memoryview]:
    """The file, block by block and verified.

    A block stays valid until the second next is asked for, so it can be sent while the next is
    read.
    """
    memories = [bytearray(min(BLOCK_BYTES, file.bytes)) for _ in range(2)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    for number, (begin, end, cuts) in enumerate(_verified_by(file)):
        block = memoryview(memories[number % 2])[: end - begin]
        source.read_into(block, begin)
        _verify(file, addresses[number % 2] - begin, cuts)
        yield block


def viewed_blocks(file: DataFile, view: _core.File) -> Iterator[memoryview]:
    """blocks(), of a file that is memory: read-only, verified in place, and valid for ever.

    A block is sent some time after it was verified, from the same memory, and nothing may change it
    in between. statehold does not: it never writes a committed file. It does not overwrite a
    retired or replaced file while any process has it mapped (Store, Fs.can_reuse). The view is such
    a mapping, and the sender of a block holds the view. A change by a stranger in that moment
    arrives as damage, which a reader there finds, like damage that comes later.
    """
    memory, address = view.view, view.address
    for begin, end, cuts in _verified_by(file):
        _verify(file, address, cuts)
        yield memory[begin:end]


Cut = tuple[FileSpan, int, int, int]


def _verified_by(file: DataFile) -> Iterator[tuple[int, int, list[Cut]]]:
    """(begin, end) of each block, and the pieces that verify it: (span, begin, end, checksum).

    Blocks are whole pieces, so the pieces that end in a block also begin in it.
    """
    cuts = [
        (span, begin, end, expected)
        for span in file.spans
        for begin, end, expected in _expected(file, span)
    ]
    at = 0
    for begin in range(0, file.bytes, BLOCK_BYTES):
        end = min(begin + BLOCK_BYTES, file.bytes)
        first = at
        while at < len(cuts) and cuts[at][2] <= end:
            at += 1
        yield begin, end, cuts[first:at]


def _verify(file: DataFile, address: int, cuts: Sequence[Cut]) -> None:
    """Compare pieces with their checksums; `address` is that of the file's first byte."""
    for span, begin, end, expected in cuts:
        got = _core.hash_memory(address + begin, end - begin)
        if got != expected:
            raise _mismatch(file, span, (begin, end), expected, got)


# -- shared files that the level has already -------------------------------------------------------
# A copy of a step gets them by a second name. The newest step of the level holds most files that
# the step before it at the source shared with this one. Two files with the same spans, and the same
# checksums of all of them, are one and the same.
#
# Only files that steps share are looked for, so a run without such files reads nothing more. If the
# newest step cannot be read, or goes away meanwhile, the files are copied.


# The size of a file, of its blocks, and its spans with their checksums.
Content = tuple[int, int, tuple[FileSpan, ...]]


class Already:
    """The shared files in the newest step of a store, while a copy of another step is made."""

    def __init__(self, store: Store, step: int, files: Sequence[DataFile]) -> None:
        self._store = store
        self._step = step
        self._writers = {_writer(file) for file in files if is_shared(file.name)}
        self._paths: dict[Content, str] = {}

    @contextlib.contextmanager
    def known(self, source: Callable[[int], Shelf]) -> Iterator[None]:
        """Look the files up, and keep their step while the context lasts.

        source: where the documents of a step are read.
        """
        newest = self._newest() if self._writers else None
        if newest is None:
            yield
            return
        with self._store.protect(newest):
            with contextlib.suppress(StateholdError):  # then nothing is known
                self._look(newest, source(newest))
            yield

    def _newest(self) -> int | None:
        """The newest step but for the one that is made: that may be there from an earlier save."""
        with contextlib.suppress(StorageError):
            return max((step for step in self._store.steps() if step != self._step), default=None)
        return None

    def _look(self, step: int, source: Shelf) -> None:
        for file in part_of(source, step, self._share).files:
            if is_shared(file.name):
                self._paths[content_of(file)] = f"{self._store.path(step)}/{file.name}"

    def link(self, file: DataFile, attempt: str) -> bool:
        """Give the file to the step that is made, if it is there. False if it has to be copied."""
        path = self._paths.get(content_of(file))
        if path is None:
            return False
        with contextlib.suppress(StorageError):  # a copy of the file is as good
            return self._store.link(self._step, file.name, path, attempt)
        return False

    def _share(self, saved: int, _: bytes) -> list[int]:
        return [writer for writer in sorted(self._writers) if writer < saved]


def content_of(file: DataFile) -> Content:
    """Equal for files with equal bytes, and for no others."""
    return file.bytes, file.block_bytes, file.spans


def is_shared(name: str) -> bool:
    """Whether other steps may have the file, too: a rank writes its first one for each step."""
    found = file_of(name)
    return found is not None and found[2] > 0


def _writer(file: DataFile) -> int:
    found = file_of(file.name)
    return found[0] if found else 0
