"""The native core: moves bytes, decides nothing. Contracts in native/*.h.

Arguments typed `Buffer` are contiguous buffers of 8-byte integers, such as `array.array("q")`.
Everything that can block releases the GIL. Waits take seconds (None: for ever), return False when
the time is over, and raise the error of a job that has failed; by then the job no longer touches
the caller's memory. After a fork, a child must not use objects of its parent: they refuse.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

Buffer = array[int] | memoryview
# Element size in bytes, shape, and strides in elements.
Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
# Element size in bytes, shape of a dense chunk, low index and shape of a box in it, strides in
# elements of where the box goes, bytes of the chunk that lie before the segment.
BoxTarget = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
# Segment, offset in the segment, offset in the buffer, bytes.
Piece = tuple[int, int, int, int]

# The bits of a byte in `flags`.
SEGMENT_EAGER: Final[int]  # copied before the others
SEGMENT_EXTERNAL: Final[int]  # Python moves its bytes, through Fill and Ready
SEGMENT_SHARED: Final[int]  # other processes read it, too: it is read through the page cache

class Mismatch(ValueError):
    """A piece differs from its checksum."""

    path: str
    segment: int  # index into the arrays given to read()
    piece: int  # counted inside the segment
    begin: int  # file offsets
    end: int
    expected: int
    got: int

class File:
    """An open data file, closed by WriteJob.finish() or close().

    After close() the descriptor stays open until the last transfer in flight has completed. One
    that is memory is closed by close() only, and stays mapped until jobs and views let go of it.
    """

    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    def size_bytes(self) -> int: ...
    def read_into(self, memory: bytearray | memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on; not for direct files."""
    def sync(self) -> None:
        """Make data and size durable; Fs.sync_dir does that for the name."""
    @property
    def mapped(self) -> bool:
        """Opened to be written as memory."""
    @property
    def address(self) -> int:
        """Of a file that is memory; 0 for others."""
    @property
    def view(self) -> memoryview:
        """Of a file that is memory, read-only; empty for others. Keeps it mapped."""
    def populate(self, begin: int, nbytes: int) -> None:
        """Pay for the page faults of a new mapped file now, not during a save."""
    def close(self) -> None: ...
    def close_alone(self, within_s: float) -> bool:
        """Close, and return once no transfer and no job has the file open any more; False if one
        still has it after `within_s` seconds."""

class Fs:
    """Every effect on storage. Failures raise the errors of statehold.errors."""

    @property
    def backend(self) -> str: ...
    @property
    def note(self) -> str: ...
    def mkdir(self, path: str) -> None: ...
    def rename(self, src: str, dst: str) -> None: ...
    def exchange(self, a: str, b: str) -> None: ...
    def link(self, src: str, dst: str) -> None:
        """A second name for a file. From then on no function here writes it again (EMLINK)."""
    def unlink(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def listdir(self, path: str) -> list[tuple[str, bool]]: ...
    def stat_bytes(self, path: str) -> int | None:
        """Size of a file, 0 for a directory, None when there is nothing."""
    def is_dir(self, path: str) -> bool: ...
    def sync_dir(self, path: str) -> None: ...
    def write_file(self, path: str, data: bytes) -> None: ...
    def read_file(self, path: str, max_bytes: int) -> bytes: ...
    def open_write(
        self,
        path: str,
        bytes: int,
        reuse: bool = False,
        *,
        mapped: bool = False,
        kept: File | None = None,
    ) -> File:
        """`mapped`: as memory; refused (EOPNOTSUPP) where the file system is not in memory.

        `kept` is a mapped file of before; the call closes it, and goes on with its mapping where it
        is the file at `path` and nobody else has it.
        """
    def open_read(self, path: str, *, direct: bool = False) -> File:
        """`direct`: past the page cache; refused (EINVAL) where the file system cannot."""
    def can_reuse(self, path: str, kept: File | None = None) -> bool:
        """Whether overwriting the file hurts nobody: it is ours, has one name, and is not open.

        `kept`: this process has the file mapped, and nobody else may.
        """
    def open_view(self, path: str, bytes: int) -> File:
        """A file in memory to be read as memory; refused where open_write(mapped=True) is."""
    def close(self) -> None: ...

def open_fs(backend: str = "auto", queue_depth: int = 32, io_threads: int = 4) -> Fs: ...

class BufferPool:
    """The allocator of the staging buffers, for tests."""

    def __init__(self, count: int, buffer_bytes: int) -> None: ...
    @property
    def free_count(self) -> int: ...
    def acquire_nowait(self) -> tuple[int, int, int] | None:
        """Index, generation and address of a free buffer."""
    def release(self, index: int, generation: int) -> None: ...

class Engine:
    """Staging buffers and the threads that copy, hash and verify.

    `clients` is a table of (reserved buffers, weight), each at least 1; a client is its index. What
    nobody has reserved is common. Copy threads and the disk are shared by weight where clients
    compete. A path is a number that the caller gives to a device or a directory.
    """

    def __init__(
        self,
        fs: Fs,
        staging_bytes: int,
        buffer_bytes: int = 16777216,
        copy_threads: int = 2,
        clients: Sequence[tuple[int, int]] = ...,
    ) -> None: ...
    @property
    def staging(self) -> memoryview: ...
    @property
    def staging_address(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def buffer_count(self) -> int: ...
    def write(
        self,
        *,
        file_bytes: int,
        block_bytes: int,
        begins: Buffer,
        sizes: Buffer,
        addresses: Buffer,
        flags: bytes,
        strided: dict[int, Strided],
        header: bytes,
        owner: object,
        file: File | None = None,
        expected: bytes = b"",
        client: int = 0,
        path: int = 0,
    ) -> WriteJob:
        """Start copying. Keys of `strided` index the arrays (0 is the first after the header).

        `owner` is whatever keeps the memory at `addresses` alive, such as the list of tensors; the
        job holds a reference to it while it may copy. None: the memory outlives the job anyway.
        `file` is attached from the start: into one that is mapped everything but external
        segments is copied directly, without a buffer.
        `expected` are the checksums of a file that is there, as checksums() returns them. If all
        bytes have them, the job is complete without a file. Otherwise it needs one (attach).
        """
    def read(
        self,
        *,
        files: Sequence[str],
        file_bytes: Sequence[int],
        block_bytes: int,
        file_index: Buffer,
        begins: Buffer,
        sizes: Buffer,
        addresses: Buffer,
        flags: bytes,
        strided: dict[int, Strided],
        sums: bytes,
        owner: object,
        boxes: dict[int, BoxTarget] = ...,
        first_segment: int = 0,
        client: int = 0,
        path: int = 0,
    ) -> ReadJob:
        """Start reading.

        `owner` keeps the memory at `addresses` alive, as in write().

        Of a segment in `boxes` all is verified, and what lies in the box placed. Blocks are taken
        cyclically from the one that holds `first_segment`.
        """
    def ranges(
        self,
        *,
        write: bool,
        files: Sequence[File],
        file_index: Buffer,
        offsets: Buffer,
        sizes: Buffer,
        addresses: Buffer,
        sums: bytes = b"",
        owner: object,
        client: int = 0,
        paths: Sequence[int] = (),
        transfer_bytes: int = 0,
        verified: bool = True,
        staged: bool = False,
    ) -> RangesJob:
        """Start moving ranges of open files to or from `addresses`.

        Reading takes the XXH3-64 of each range in `sums`. If it is not `verified`, it takes none,
        and checksums() has those of what was read. What is written and not `verified` is not
        hashed, and its checksums are 0. In a file that is written directly, a range begins at a
        multiple of 4096, and the rest of its last page becomes zeros. Nothing is copied where
        offset, size and address are multiples of 4096. Nobody may change the memory before the job
        is done. `paths` says on which path each file is. Ranges that lie side by side in a file and
        in memory are moved together, up to `transfer_bytes`. A job that is `staged` moves all of a
        direct file through buffers, which are huge pages, and copies: memory in small pages makes a
        disk slow. `owner` is as in write().
        """
    def set_limit(self, path: int, client: int | None, bytes_per_s: int) -> None:
        """Limit what starts on a path from now on, for one client, or (None) for all together.
        0 lifts the limit."""
    def client_stats(self, client: int) -> dict[str, int]:
        """buffers: held now. read_bytes and written_bytes: by transfers to and from storage, not
        what was read through the page cache or stored in files that are memory."""
    def settle(self, all_buffers: bool = False) -> None:
        """Return once no thread of the engine finds anything to do. For tests. all_buffers: before
        the first job, all buffers are made ready for it."""
    def close(self) -> None: ...

class Fill:
    """A buffer of a WriteJob that waits for bytes from Python. In `pieces`, segment 0 is the
    header and segment i the arrays' element i - 1."""

    @property
    def token(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def pieces(self) -> list[Piece]: ...
    @property
    def view(self) -> memoryview: ...

class WriteJob:
    """One file being written.

    Dropping the last reference cancels the job, waits until no native thread copies for it, and
    only then lets go of the `owner` given to write(). wait_copied() and wait_written() let go of
    the owner when they return True or raise the job's error; cancel() lets go of it, too.
    """

    def attach(self, file: File, before: File | None = None) -> None:
        """`before`: the file with the expected bytes, open for reading and not direct. It gives the
        bytes that were as expected."""
    def wait_compared(self, timeout: float | None) -> bool:
        """Return once it is known whether all bytes are as expected."""
    @property
    def is_refuted(self) -> bool:
        """Whether some bytes are not as expected."""
    def wait_eager(self, timeout: float | None) -> bool:
        """Not for the external segments in the same blocks: Python knows about those."""
    def wait_copied(self, timeout: float | None) -> bool:
        """Return once all bytes are in buffers, or in the file. Their checksums come later."""
    def wait_written(self, timeout: float | None) -> bool: ...
    def finish(self) -> None: ...
    def checksums(self) -> bytes: ...
    def cancel(self) -> None: ...
    def next_fill(self, timeout: float | None) -> Fill | None: ...
    def next_fills(self, timeout: float | None, most: int) -> list[Fill]:
        """Wait for one, and take the others that are there."""
    def filled(self, fill: Fill, *, is_there: bool = False) -> None:
        """Give the buffer back; after a failure, too. Who drops `fill` instead cancels the job.

        `is_there`: the file has these bytes, which are all of the block: they are hashed and not
        written.
        """
    def filled_all(self, fills: Sequence[Fill]) -> None:
        """Give back those of them that are still lent."""
    @property
    def fills_left(self) -> int:
        """Blocks that next_fill has not handed out yet."""
    @property
    def stats(self) -> dict[str, int]: ...

class Ready:
    """A verified buffer of a ReadJob that Python has to empty. In `pieces`, segments index the
    arrays given to read()."""

    @property
    def token(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def pieces(self) -> list[Piece]: ...
    @property
    def view(self) -> memoryview: ...

class ReadJob:
    """Segments being read and verified.

    Dropping the last reference cancels the job, waits until no native thread stores anything for
    it, and only then lets go of the `owner` given to read(). wait() lets go of the owner when it
    returns True or raises the job's error; cancel() lets go of it, too.
    """

    def wait(self, timeout: float | None) -> bool: ...
    def next_ready(self, timeout: float | None) -> Ready | None: ...
    def next_readies(self, timeout: float | None, most: int) -> list[Ready]:
        """Wait for one, and take the others that are there."""
    def release(self, ready: Ready) -> None:
        """Give the buffer back; after a failure, too. Who drops `ready` instead cancels the job."""
    def release_all(self, readies: Sequence[Ready]) -> None:
        """Give back those of them that are still lent."""
    @property
    def ready_left(self) -> int:
        """Blocks that next_ready has not handed out yet."""
    def cancel(self) -> None: ...
    @property
    def stats(self) -> dict[str, int]:
        """bytes: asked for, summed over the segments. cached_bytes and direct_bytes: read through
        the page cache and past it; once however many segments want them, and with the gaps
        between segments where a buffer was read as a whole."""

class RangesJob:
    """Ranges of files being moved.

    Dropping the last reference cancels the job, waits until nothing touches the memory for it, and
    only then lets go of the `owner` given to ranges(). wait() lets go of the owner when it returns
    True or raises the job's error; cancel() lets go of it, too.
    """

    def wait(self, timeout: float | None) -> bool: ...
    def next_done(self, timeout: float | None) -> list[int]:
        """The ranges that are done and were not returned before; waits until there is one. Empty
        when the time is over, or when all were returned."""
    @property
    def unreturned(self) -> int:
        """Ranges that next_done has not returned yet."""
    def checksums(self) -> bytes:
        """After wait(): the XXH3-64 of each range."""
    def cancel(self) -> None: ...
    @property
    def stats(self) -> dict[str, int]:
        """bytes: of all ranges. copied_bytes: of those, what went through buffers."""

def xxh3_64(data: bytes) -> int: ...
def hash_memory(address: int, nbytes: int) -> int:
    """XXH3-64 of memory that the caller keeps alive and unchanged."""

SEATS_MAX: Final[int]
SPACES_MAX: Final[int]
RANKED: Final[int]
PAGE_ENTRY_BYTES: Final[int]

class PageTable:
    """Which slots of a tier hold which pages, in `memory` of nbytes(slots); new memory is zeros.

    Contract in native/page_table.h. A damaged table raises IndexError, and mend() makes that good.
    """

    def __init__(self, memory: memoryview, slots: int) -> None: ...
    @staticmethod
    def nbytes(slots: int) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def is_new(self) -> bool: ...
    def create(self) -> None: ...
    def find(self, index: int) -> int: ...
    def find_all(self, indices: list[int]) -> list[int]: ...
    def generation(self, slot: int) -> int: ...
    def index(self, slot: int) -> int: ...
    @property
    def evicted(self) -> int: ...
    def pages(self) -> int: ...
    @property
    def boot(self) -> int: ...
    @boot.setter
    def boot(self, boot: int) -> None: ...
    @property
    def is_torn(self) -> bool: ...
    def count(self, seat: int, amounts: list[int]) -> None:
        """Add to the counters of the identity that a seat uses. Needs no lock."""

    def counted(self) -> list[tuple[bytes, int, list[int]]]:
        """By identity: its pages, and what was counted; last, under b"", what identities have
        counted whose place was given to another one."""

    def begin_change(self, now_s: int = 0) -> None:
        """now_s: Unix time. Pages that this change uses were used then."""

    def end_change(self) -> None: ...
    def take(self, seat: int, below: int = ...) -> int: ...
    def publish(
        self, slot: int, index: int, before: int, space: int, score: float = 0.0
    ) -> bool: ...
    def hold(self, slot: int, seat: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def free(self, slot: int) -> None: ...
    def drop(
        self, identities: list[bytes], before_s: int, most: int, keep: int = 0
    ) -> list[tuple[int, bytes]]:
        """Free the slots of at most `most` pages that were last used before a second, of these
        identities (of all, without one), those that go first in front, while more than `keep` are
        there. Returns the slots, and the identities. Mends what is damaged."""

    def cut(self, below: int) -> None: ...
    def touch(self, slots: list[int]) -> None: ...
    def space(self, identity: bytes) -> int: ...
    def seat(self, seat: int, space: int | None) -> None: ...
    def clear_seats(self, dead: bytes) -> list[int]:
        """dead: a byte for each seat, 0 for those that are alive."""
    def mend(self) -> None: ...
    def adopt(self, first: int, headers: memoryview, stride: int) -> None:
        """Take up the pages of the slots from `first` on, whose headers are `stride` apart."""

    def entries(self, first: int, count: int) -> bytes:
        """What slots hold, in PAGE_ENTRY_BYTES each."""

    def adopt_entries(self, first: int, entries: bytes) -> list[tuple[int, int]]:
        """Take up the pages that entries name, of the slots from `first` on. Returns the rows of
        slots of which they tell nothing: the first one, and their number."""

def page_indices(identity: bytes, keys: Sequence[bytes]) -> list[int]:
    """By which each page is found. Raises ValueError for anything but a key."""

def read_page_header(
    memory: bytes | memoryview,
) -> tuple[bytes, bytes, int, int, int, float] | None:
    """(identity, key, bytes, checksum, index of the page before, score); None if it proves nothing.
    Format in native/page_header.h."""

def fill_page(
    address: int, page: memoryview, identity: bytes, key: bytes, before: int, score: float
) -> None:
    """Copy a page into a slot, and write its header: the checksum is that of what was copied."""

def call_copies(
    function: int, *, to: array[int], source: array[int], sizes: array[int], kind: int, stream: int
) -> int:
    """Call cudaMemcpyAsync, or what has its signature, for each copy, without the interpreter lock.
    0, or the first error, after which nothing more is called."""

def read_forms(tensors: list[Any], exchange: object) -> tuple[bytes, bytes, bytes, list[int]]:
    """(shapes, strides, dtypes, addresses) of tensors whose type offers `exchange`, the capsule of
    DLPack's C functions. The bytes of two lists are equal exactly when these are. Raises what torch
    says of a tensor that it cannot describe so."""

def read_members(objects: list[Any], readers: list[Any]) -> list[list[Any]]:
    """What each reader says of each object: a list for each reader, which is the descriptor of an
    attribute, or is called with the object."""

def read_elements(addresses: list[int], size: int) -> bytearray:
    """A copy of the elements of `size` bytes at these addresses."""

def raw_write(
    fs: Fs, path: str, file_bytes: int, buffer_bytes: int, depth: int, reuse: bool
) -> float: ...
def raw_read(fs: Fs, path: str, buffer_bytes: int, depth: int) -> float: ...
