"""The two tiers of a store: slots in memory that a host shares, and slots in files.

    HOME/kv-<name>            in /dev/shm: the table of the memory, then its slots
    STORE/index               the table of the files
    STORE/segment-000000      slots; a segment is made when those before it are full

Invariants: a slot has the same bytes in memory and in a file, so a page moves between them as it
is. Memory and segments have their storage before they are used: a write cannot find that there is
none. The files never take more than the budget, which counts the index, too.
Not here: which slot is whose (table), when pages move (store).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from statehold.errors import NoSpaceError, StorageError, UsageError, storage_error
from statehold.io.memory_room import spare_memory
from statehold.kv.page import HEADER_BYTES
from statehold.kv.table import SlotTable
from statehold.process.host_memory import home
from statehold.units import MiB, format_bytes

if TYPE_CHECKING:
    from statehold._core import File, Fs

SLOTS_MIN = 8
SEGMENT_BYTES = 256 * MiB

_INDEX = "index"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Mapped:
    """A file that this process maps, and shares; new ones are zeros, and have their storage."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
            try:
                if os.fstat(fd).st_size != nbytes:
                    os.ftruncate(fd, 0)
                    _reserve(fd, nbytes, path)
                self._map = mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error("map a table of pages", error.errno or 0, path) from error
        self.view = memoryview(self._map)

    @property
    def address(self) -> int:
        """Of the first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def flush(self) -> None:
        """Make the bytes durable. Raises OSError."""
        self._map.flush()

    def close(self) -> None:
        """Unmap, once nothing uses the view."""
        self.view.release()
        with contextlib.suppress(BufferError):  # somebody has an address; the process ends soon
            self._map.close()


def _reserve(fd: int, nbytes: int, path: str) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            os.unlink(path)
            raise
        os.ftruncate(fd, nbytes)


class MemoryTier:
    """Slots in memory for the store `name`. nbytes: how much to take.

    The first process on the host decides how many slots there are.
    """

    def __init__(self, name: str, nbytes: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        path = f"{home()}/kv-{name}-{slot_bytes}"
        slots = _slots_there(path) or max(SLOTS_MIN, nbytes // slot_bytes)
        self._begin = _pages(SlotTable.nbytes(slots))
        nbytes = self._begin + slots * slot_bytes
        if not os.path.exists(path):
            _check_room(nbytes)
        self._mapped = Mapped(path, nbytes)
        self.table = SlotTable(self._mapped.view[: SlotTable.nbytes(slots)], slots)
        if self.table.is_new:
            self.table.create()
        self._address = self._mapped.address + self._begin

    def address(self, slot: int) -> int:
        """Of a slot: its header, then its payload."""
        return self._address + slot * self.slot_bytes

    def header(self, slot: int) -> bytes:
        """The first bytes of a slot."""
        at = self._begin + slot * self.slot_bytes
        return bytes(self._mapped.view[at : at + HEADER_BYTES])

    def write_header(self, slot: int, raw: bytes) -> None:
        """Write the first bytes of a slot."""
        at = self._begin + slot * self.slot_bytes
        self._mapped.view[at : at + HEADER_BYTES] = raw

    def payload(self, slot: int, nbytes: int) -> memoryview:
        """The bytes behind the header of a slot."""
        at = self._begin + slot * self.slot_bytes + HEADER_BYTES
        return self._mapped.view[at : at + nbytes]

    def close(self, *, is_last: bool) -> None:
        """Unmap. is_last: no other process uses the memory, so it goes."""
        self.table.let_go()
        if is_last:
            with contextlib.suppress(OSError):
                os.unlink(self._mapped.path)
        self._mapped.close()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The slots of a store, all in whole segments."""

    slot_bytes: int
    segment_slots: int
    slots: int

    @classmethod
    def of(cls, capacity: int, slot_bytes: int) -> Geometry:
        """As many slots as `capacity` bytes have room for. Raises UsageError without any."""
        by_segment = max(1, min(SEGMENT_BYTES, capacity // 8) // slot_bytes)
        counts = range(1, 1 + capacity // (by_segment * slot_bytes))
        segments = bisect.bisect_right(
            counts, capacity, key=lambda count: _taken(count * by_segment, slot_bytes)
        )
        if not segments:
            least = _taken(by_segment, slot_bytes) + HEADER_BYTES
            raise UsageError(
                "the capacity of a store of pages is too small",
                facts={
                    "expected": f"at least {format_bytes(least)}",
                    "got": format_bytes(capacity),
                },
                hint=f"a page takes {format_bytes(slot_bytes)}",
            )
        return cls(slot_bytes, by_segment, segments * by_segment)


class FileTier:
    """Slots in the segments of the directory `root`."""

    def __init__(self, fs: Fs, root: str, geometry: Geometry) -> None:
        self.slot_bytes, slots = geometry.slot_bytes, geometry.slots
        self._fs, self._root = fs, root
        self._by_segment = geometry.segment_slots
        self._mapped = Mapped(f"{root}/{_INDEX}", _pages(SlotTable.nbytes(slots)))
        self.table = SlotTable(self._mapped.view[: SlotTable.nbytes(slots)], slots)
        self._files: dict[tuple[int, bool], File] = {}
        self._is_full_at: int | None = None  # the segment that the storage had no room for

    def slots_on_disk(self) -> int:
        """The slots of the segments that are there, up to the first one that is not."""
        count = 0
        while os.path.exists(self._path(count // self._by_segment)) and count < self.table.slots:
            count += self._by_segment
        return count

    def _path(self, segment: int) -> str:
        return f"{self._root}/segment-{segment:06d}"

    @property
    def below(self) -> int:
        """The slots that a page may be written to: those behind have no storage."""
        if self._is_full_at is None:
            return self.table.slots
        return self._is_full_at * self._by_segment

    def file(self, slot: int, *, is_write: bool) -> tuple[File, int]:
        """The segment of a slot, and where the slot begins. A new segment gets its storage.

        Raises StorageError.
        """
        segment, at = divmod(slot, self._by_segment)
        key = segment, is_write
        if key not in self._files:
            self._files[key] = self._open(segment, is_write=is_write)
        return self._files[key], at * self.slot_bytes

    def _open(self, segment: int, *, is_write: bool) -> File:
        path = self._path(segment)
        try:
            if is_write:
                nbytes = self._by_segment * self.slot_bytes
                return self._fs.open_write(path, nbytes, reuse=os.path.exists(path))
            return self._fs.open_read(path, direct=True)
        except NoSpaceError:
            self._is_full_at = segment
            raise
        except StorageError as error:
            if is_write or error.errno != errno.EINVAL:  # a file system without O_DIRECT
                raise
            return self._fs.open_read(path)

    def flush(self) -> None:
        """Make the pages durable that were written so far, then the table. Raises OSError."""
        for (_, is_write), file in list(self._files.items()):
            if is_write:
                file.sync()
        self._mapped.flush()

    def close(self, *, is_last: bool) -> None:
        """Close the files."""
        with contextlib.suppress(OSError, StorageError):
            self.flush()
        if is_last:
            self.table.boot = 0
        self.table.let_go()
        self._mapped.close()
        for file in self._files.values():
            file.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


def _slots_there(path: str) -> int:
    try:
        with open(path, "rb") as found:
            return int.from_bytes(found.read(16)[8:], "little")
    except OSError:
        return 0


def _taken(slots: int, slot_bytes: int) -> int:
    return _pages(SlotTable.nbytes(slots)) + slots * slot_bytes


def boot() -> int:
    """Tells this run of the host's kernel from others; never 0."""
    booted = b""
    with contextlib.suppress(OSError):
        booted = _BOOT.read_bytes()
    return int.from_bytes(hashlib.sha256(booted).digest()[:8], "little") | 1


def _check_room(nbytes: int) -> None:
    room = spare_memory()
    if nbytes > room.nbytes:
        raise UsageError(
            "the memory of a store of pages has no room",
            facts={
                "expected": format_bytes(nbytes),
                "got": f"{format_bytes(room.nbytes)} {room.limit}",
            },
            hint="give memory= less",
        )
