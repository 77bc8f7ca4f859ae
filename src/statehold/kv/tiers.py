"""The two tiers of a store: slots in memory that a host shares, and slots in files.

    HOME/kv-<name>            in /dev/shm: the table of the memory, its slots, and the name of STORE
    STORE/store.json          the format, and the slots that the first process has made
    STORE/index               the table of the files
    STORE/segment-000000      slots, then an entry for each, which says what it holds; a segment is
                              made when those before it are full

Invariants: a slot has the same bytes in memory and in a file, so a page moves between them as it
is. Memory and segments have their storage before they are used: a write cannot find that there is
none. The files never take more than the budget, which counts the index, too. Entries serve only to
make a lost table again: one that is damaged tells nothing, and one that is older than its slot
costs the page. Who has the memory shares a lock of it. The next store of this user gives back
memory that nobody has, and whose directory is gone.
Not here: which slot is whose (native/page_table.h), when pages move (store).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from statehold._core import PAGE_ENTRY_BYTES, SEATS_MAX, File, Fs, PageTable
from statehold.errors import FormatVersionError, NoSpaceError, StorageError, refused, storing
from statehold.io.clients import open_past_cache
from statehold.io.memory_room import spare_memory
from statehold.kv.page import whole_blocks
from statehold.process.file_locks import LockFile
from statehold.process.host_memory import home
from statehold.process.whole_files import open_regular, replace_file
from statehold.units import MiB, format_bytes

FORMAT = 2
SLOTS_MIN = 8
SEGMENT_BYTES = 256 * MiB
TOUCH_BYTES, _POPULATE_READ = 16 * MiB, 22  # MADV_POPULATE_READ, which mmap does not name
ABOUT, INDEX, LOCK = "store.json", "index", ".lock"
# The byte of the lock of who makes a segment, and how long others wait for that.
MAKING, MAKING_S = 2 + SEATS_MAX, 10.0
# How the memory ends: it says where the store is.
_ROOT, _ROOT_BYTES = b"store of pages: ", 4096 + 16


class MappedTable:
    """A file that this process maps, and shares: a table, then `more` bytes. New ones are zeros,
    and have their storage."""

    def __init__(self, path: str, slots: int, more: int = 0) -> None:
        self.path, self.begin = path, whole_blocks(PageTable.nbytes(slots))
        nbytes = self.begin + more
        with storing("map a table of pages", path):
            # One of another size is of another build, whose processes may have it mapped: it stays
            # theirs under no name.
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_size != nbytes:
                    os.unlink(path)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o660), "r+b", 0) as file:
                if os.fstat(file.fileno()).st_size != nbytes:
                    _reserve(file.fileno(), nbytes, path)
                self.map = mmap.mmap(file.fileno(), nbytes)
        self.view = memoryview(self.map)
        self.table = PageTable(self.view[: self.begin], slots)

    def close(self) -> None:
        """Unmap, once nothing uses the table and the view."""
        del self.table
        self.view.release()
        with contextlib.suppress(BufferError):  # somebody has an address; the process ends soon
            self.map.close()


def touch(memory: mmap.mmap) -> None:
    """Map all pages of shared memory: a copy that finds them not mapped takes five times
    as long. By reading, the kernel maps them by the dozen. In parts, so that other threads run."""
    with contextlib.suppress(OSError):  # before Linux 5.14
        for begin in range(0, len(memory), TOUCH_BYTES):
            memory.madvise(_POPULATE_READ, begin, min(TOUCH_BYTES, len(memory) - begin))


def _reserve(fd: int, nbytes: int, path: str) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            os.unlink(path)
            raise
        os.ftruncate(fd, nbytes)


class MemoryTier(MappedTable):
    """Slots in memory for the store in the directory `root`. nbytes: how much to take.

    The first process on the host decides how many slots there are.
    """

    def __init__(self, root: str, nbytes: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        path = memory_path(root, slot_bytes)
        _free_lost(path)
        slots = slots_there(path) or max(SLOTS_MIN, nbytes // slot_bytes)
        room, more = spare_memory(), slots * slot_bytes + _ROOT_BYTES
        taken = os.path.getsize(path) if os.path.exists(path) else 0
        if more > room.nbytes + taken:
            text = "the memory of a store of pages has no room"
            got = f"{format_bytes(room.nbytes)} {room.limit}"
            raise refused(text, format_bytes(more), got, "give memory= less")
        super().__init__(path, slots, more)
        self._lock = LockFile(path)
        self._lock.share(0)
        self.view[-_ROOT_BYTES:] = (_ROOT + os.fsencode(root)).ljust(_ROOT_BYTES, b"\0")
        if self.table.is_new:
            self.table.create()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + self.begin

    def address(self, slot: int) -> int:
        """Of a slot: its header, then its payload."""
        return self._address + slot * self.slot_bytes

    def slot(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        at = self.begin + slot * self.slot_bytes
        return self.view[at : at + self.slot_bytes]

    def leave(self, *, is_last: bool) -> None:
        """Unmap. is_last: no other process uses the memory, so it goes."""
        if is_last:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.close()
        self._lock.close()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The slots of a store, all in whole segments."""

    slot_bytes: int
    segment_slots: int
    slots: int

    def __str__(self) -> str:
        return f"{self.slots} slots of {format_bytes(self.slot_bytes)}"

    @classmethod
    def of(cls, capacity: int, slot_bytes: int) -> Geometry:
        """As many slots as `capacity` bytes have room for. Raises UsageError without any."""
        by_segment = max(1, min(SEGMENT_BYTES, capacity // 8) // slot_bytes)

        def made(segments: int) -> Geometry:
            return cls(slot_bytes, by_segment, segments * by_segment)

        counts = range(1, 1 + capacity // (by_segment * slot_bytes))
        segments = bisect.bisect_right(counts, capacity, key=lambda count: made(count).nbytes)
        if not segments:
            least = format_bytes(made(1).nbytes)
            hint = f"a page takes {format_bytes(slot_bytes)}"
            summary = "the capacity of a store of pages is too small"
            raise refused(summary, f"at least {least}", format_bytes(capacity), hint)
        return made(segments)

    @property
    def entries_at(self) -> int:
        """Where in a segment the entries begin."""
        return self.segment_slots * self.slot_bytes

    @property
    def segment_bytes(self) -> int:
        """Of a segment."""
        return self.entries_at + whole_blocks(self.segment_slots * PAGE_ENTRY_BYTES)

    @property
    def nbytes(self) -> int:
        """Of all files: segments, index, store.json."""
        segments, index = self.slots // self.segment_slots, PageTable.nbytes(self.slots)
        return segments * self.segment_bytes + whole_blocks(index) + whole_blocks(1)

    def note(self, root: str, table: PageTable, slots: Iterable[int]) -> None:
        """Say in the segments what these slots hold, as the table does. If the storage refuses,
        what they said before stays."""
        for segment, there in groupby(sorted(slots), lambda slot: slot // self.segment_slots):
            path = segment_path(root, segment)
            with contextlib.suppress(OSError), open(path, "r+b", 0, opener=open_regular) as file:
                for _, row in groupby(enumerate(there), lambda each: each[1] - each[0]):
                    first, *others = (slot for _, slot in row)
                    at = self.entries_at + first % self.segment_slots * PAGE_ENTRY_BYTES
                    os.pwrite(file.fileno(), table.entries(first, 1 + len(others)), at)

    @classmethod
    def read(cls, path: str) -> Geometry:
        """The geometry of the store in a directory.

        Raises FileNotFoundError without a store, UsageError if store.json is damaged, StorageError
        if it cannot be read, and FormatVersionError.
        """
        where = f"{path}/{ABOUT}"
        if not os.path.exists(where):
            raise FileNotFoundError(where)
        with storing("read a store of pages", where), open(where, "rb") as found:
            raw = found.read(4096)
        try:
            about = json.loads(raw)
            if (version := about["format"]) == FORMAT:
                made = cls(**about["geometry"])
                if all(type(n) is int and 0 < n < 1 << 32 for n in asdict(made).values()):
                    return made
                raise ValueError(made)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise no_store(path, error) from error
        raise FormatVersionError(
            "another version of statehold has made the store of pages",
            facts={"path": path, "expected": FORMAT, "got": version},
            hint="use another directory, or delete this one: its pages are computed again",
        )

    def write(self, path: str) -> None:
        """Make the directory a store."""
        content = {"format": FORMAT, "geometry": asdict(self)}
        replace_file(f"{path}/{ABOUT}", json.dumps(content).encode())


class FileTier(MappedTable):
    """Slots in the segments of the directory `root`."""

    def __init__(self, fs: Fs, root: str, geometry: Geometry) -> None:
        self.slot_bytes, self._by_segment = geometry.slot_bytes, geometry.segment_slots
        self._geometry = geometry
        super().__init__(f"{root}/{INDEX}", geometry.slots)
        self._fs, self._root = fs, root
        self._files: dict[tuple[int, bool], File] = {}
        # The slots that a page may be written to: those behind have no storage.
        self.below = geometry.slots

    def note(self, slots: Iterable[int]) -> None:
        """Say in the segments what these slots hold now. That may wait for the storage, so it is
        done without the lock of the tables."""
        self._geometry.note(self._root, self.table, slots)

    def adopt(self, most: int) -> Iterator[tuple[int, int]]:
        """Find the pages that the segments name. What the others hold, their headers say: of each
        row of such slots the first one, and their number, which is at most so many."""
        at, nbytes = self._geometry.entries_at, self._by_segment * PAGE_ENTRY_BYTES
        for begin in range(0, self.table.slots, self._by_segment):
            path, raw = segment_path(self._root, begin // self._by_segment), b""
            if not os.path.exists(path):
                continue
            with contextlib.suppress(OSError), open(path, "rb", 0, opener=open_regular) as file:
                raw = os.pread(file.fileno(), nbytes, at)
            for first, count in self.table.adopt_entries(begin, raw.ljust(nbytes, b"\0")):
                for part in range(first, first + count, most):
                    yield part, min(most, first + count - part)

    def file(self, slot: int, *, is_write: bool) -> tuple[File, int]:
        """The segment of a slot, and where the slot begins. A new segment gets its storage.

        Raises StorageError.
        """
        segment, at = divmod(slot, self._by_segment)
        key = segment, is_write
        if key not in self._files:
            self._files[key] = self._open(segment, is_write=is_write)
        return self._files[key], at * self.slot_bytes

    def grow(self) -> int:
        """Use one more segment if the disk was full, and the segment is there or has room now.
        Returns `below`."""
        if self.below < self.table.slots:
            segment, nbytes = self.below // self._by_segment, self._geometry.segment_bytes
            with contextlib.suppress(OSError, StorageError):
                disk = os.statvfs(self._root)
                has_room = disk.f_bavail * disk.f_frsize >= nbytes
                if has_room or os.path.exists(segment_path(self._root, segment)):
                    self.file(self.below, is_write=True)
                    self.below += self._by_segment
        return self.below

    def _open(self, segment: int, *, is_write: bool) -> File:
        path = segment_path(self._root, segment)
        if not is_write:
            return open_past_cache(self._fs, path)
        nbytes, lock = self._geometry.segment_bytes, f"{self._root}/{LOCK}"
        try:
            with storing("make a segment", path), contextlib.closing(LockFile(lock)) as making:
                making.take(MAKING, MAKING_S)  # who has no room takes the file away again
                return self._fs.open_write(path, nbytes, reuse=os.path.exists(path))
        except NoSpaceError:
            self.below = min(self.below, segment * self._by_segment)
            raise

    def flush(self) -> None:
        """Make the pages durable that were written so far, then the table. Raises OSError."""
        for (_, is_write), file in list(self._files.items()):
            if is_write:
                file.sync()
        self.map.flush()

    def leave(self, *, is_last: bool) -> None:
        """Close the files."""
        with contextlib.suppress(OSError, StorageError):
            self.flush()
        if is_last:
            self.table.boot = 0
        self.close()
        for file in self._files.values():
            file.close()


def no_store(path: str, damage: Exception | None = None) -> Exception:
    """The error for a directory of other things, or with a damaged store.json."""
    safe = {"path": path, "still safe": "all files, and processes that have the store open"}
    if damage is not None:
        summary, got = "the store of pages has a damaged store.json", f"{damage!r}"
        hint = "put a copy of it back, or delete the directory: its pages are computed again"
        return refused(summary, "the format and the slots, in JSON", got, hint, **safe)
    hint = "give the directory of a PageStore, or for a new one an empty directory or none"
    names = sorted({*os.listdir(path)} - {LOCK}) if os.path.isdir(path) else ["no directory"]
    got = ", ".join(names[:3]) or "an empty directory, where no process has opened a store"
    return refused("the directory is no store of pages", ABOUT, got, hint, **safe)


def memory_path(root: str, slot_bytes: int) -> str:
    """Of the memory for the store in the directory `root`, by whatever name that is known."""
    return f"{home()}/kv-{_name_of(root)}-{slot_bytes}"


def _name_of(root: str) -> str:
    made = os.stat(f"{root}/{ABOUT}")  # a later one may have the number of a deleted one
    return hashlib.sha256(repr((made.st_dev, made.st_ino, made.st_mtime_ns)).encode()).hexdigest()


def _free_lost(kept: str) -> None:
    """Give back the memory of stores whose directory is gone, and that no process has. kept: stays,
    although its directory may have had another name."""
    for each in {*Path(home()).glob("kv-*")} - {Path(kept)}:
        with contextlib.suppress(OSError), open(each, "rb") as file:
            file.seek(-_ROOT_BYTES, os.SEEK_END)
            mark, root = file.read(len(_ROOT)), os.fsdecode(file.read().rstrip(b"\0"))
            with contextlib.closing(LockFile(os.fspath(each), is_made=False)) as lock:
                if mark != _ROOT or lock.is_taken(0):
                    continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if _name_of(root) in each.name:
                    continue
            each.unlink()


def slots_there(path: str) -> int:
    """How many slots the table in a file has; 0 without one."""
    try:
        with open(path, "rb") as found:
            return int.from_bytes(found.read(16)[8:], "little")
    except OSError:
        return 0


def segment_path(root: str, segment: int) -> str:
    """Of a segment of the store in the directory `root`."""
    return f"{root}/segment-{segment:06d}"


def boot() -> int:
    """Tells this run of the host's kernel from others; never 0."""
    booted = b""
    with contextlib.suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return int.from_bytes(hashlib.sha256(booted).digest()[:8], "little") | 1
