"""A store of pages that a process has opened: its tiers, its seat, and the lock of the tables.

    STORE/store.json    the format, and the slots that the first process has made
    STORE/.lock         byte 0: around changes of the tables; those behind it: a seat each

Invariants: what a dead process was filling is free again when the next one opens the store. A table
that is lost, or older than the pages because the host has lost its power, is made again: from the
headers of the slots, or from its columns. All processes are on one host, because they share memory.
Not here: pages on their way (store), the tables (table), their memory and files (tiers).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import (
    FormatVersionError,
    RunBusyError,
    StateholdError,
    UsageError,
    WaitTimeout,
    storage_error,
)
from statehold.io.clients import Client, open_engine
from statehold.kv.page import HEADER_BYTES, Header, slot_bytes, whole_blocks
from statehold.kv.table import SEATS_MAX
from statehold.kv.tiers import FileTier, Geometry, MemoryTier, boot
from statehold.process.file_locks import LockFile
from statehold.process.ownership import make_own_directory
from statehold.process.whole_files import replace_file
from statehold.units import MiB, format_bytes

if TYPE_CHECKING:
    from statehold._core import File, RangesJob

logger = logging.getLogger("statehold")

FORMAT = 1
BUFFER_BYTES = 1 * MiB
# Pages that lie side by side move together, up to so many bytes.
TRANSFER_BYTES = 2 * MiB
# Slots whose headers are read at a time.
HEADERS = 64

# A page: its slot in memory, its slot in a file, its bytes.
Move = tuple[int, int, int]

_ABOUT = "store.json"
_LOCK = ".lock"
_TABLES = 0
# How long the constructor, close() and a new identity wait for a process that holds the tables.
_LOCK_S = 10.0


class OpenStore:
    """The store in the directory `path`, for one process. Raises as PageStore does."""

    def __init__(self, path: str, *, page_bytes: int, capacity: int, memory: int) -> None:
        self.path = path
        self._guard = threading.RLock()
        self._warned = set[str]()
        with contextlib.ExitStack() as opened:
            make_own_directory(path, "of a store of pages")
            size = slot_bytes(page_bytes)
            self._lock = LockFile(f"{path}/{_LOCK}")
            opened.callback(self._lock.close)
            self.seat = self._sit()
            fs = _core.open_fs()
            opened.callback(fs.close)
            self._engine = open_engine(fs, 2 * BUFFER_BYTES, BUFFER_BYTES, 2)
            opened.callback(self._engine.close)
            self._tiers = opened.enter_context(contextlib.ExitStack())
            with self._held(_LOCK_S):
                self.files = FileTier(fs, path, self._geometry(capacity, size))
                self._tiers.callback(lambda: self.files.close(is_last=self._is_alone()))
                self.memory = MemoryTier(_name(path), memory, size)
                self._tiers.callback(lambda: self.memory.close(is_last=self._is_alone()))
                self._recover()
            self._opened = opened.pop_all()

    def close(self, filling: Iterable[int] = ()) -> None:
        """Give up the seat, the memory and the files. Nothing uses them any more.

        filling: slots in memory that this process has taken, and that hold nothing.
        """
        with contextlib.suppress(WaitTimeout), self._held(_LOCK_S):
            with self.memory.table.change(), self.files.table.change():
                for slot in filling:
                    self.memory.table.free(slot)
                self.memory.table.seat(self.seat, None)
                self.files.table.seat(self.seat, None)
            self._tiers.close()  # under the lock: nobody opens the store meanwhile
        self._opened.close()

    def use(self, identity: bytes) -> None:
        """This process uses the pages of an identity, so they go last."""
        with self.changing(_LOCK_S):
            for tier in (self.memory, self.files):
                tier.table.seat(self.seat, tier.table.space(identity))

    def flush(self) -> None:
        """Make durable what was written. Raises StorageError."""
        try:
            self.files.flush()
        except OSError as error:
            raise storage_error("flush pages", error.errno or 0, self.path) from error

    def warn(self, action: str, error: Exception) -> None:
        """Log what the storage refuses, once for each kind of action."""
        if action not in self._warned:
            self._warned.add(action)
            logger.warning(
                "the store of pages %s could not %s a page; it goes on with those that it can\n%s",
                self.path, action, error,
            )  # fmt: skip

    def job(self, moves: Sequence[Move], *, is_write: bool = False) -> RangesJob:
        """Begin to move pages between their slots in memory and in files. Raises StorageError."""
        files: list[File] = []
        starts, offsets, sizes, addresses = (array("Q") for _ in range(4))
        for slot, there, nbytes in moves:
            file, at = self.files.file(there, is_write=is_write)
            if not files or files[-1] is not file:
                files.append(file)
            address = self.memory.address(slot)
            starts.extend((len(files) - 1,) * 2)
            offsets.extend((at, at + HEADER_BYTES))
            sizes.extend((HEADER_BYTES, whole_blocks(nbytes)))
            addresses.extend((address, address + HEADER_BYTES))
        return self._engine.ranges(
            write=is_write,
            files=files,
            file_index=starts,
            offsets=offsets,
            sizes=sizes,
            addresses=addresses,
            owner=self.memory,
            client=Client.PAGE_WRITE if is_write else Client.PAGE_READ,
            transfer_bytes=max(TRANSFER_BYTES, self.files.slot_bytes),
            verified=is_write,
        )

    @contextlib.contextmanager
    def _held(self, timeout_s: float | None) -> Iterator[None]:
        """The lock of the tables. Raises WaitTimeout."""
        until = -1.0 if timeout_s is None else max(0.0, timeout_s)
        if not self._guard.acquire(timeout=until):
            raise _late(self.path)
        try:
            if not self._lock.take(_TABLES, timeout_s):
                raise _late(self.path)
            try:
                yield
            finally:
                self._lock.drop(_TABLES)
        finally:
            self._guard.release()

    @contextlib.contextmanager
    def changing(self, timeout_s: float | None) -> Iterator[None]:
        """Around changes of the tables, which no other process changes then. Raises WaitTimeout."""
        with self._held(timeout_s), self.memory.table.change(), self.files.table.change():
            yield

    def _sit(self) -> int:
        """A seat of the store: a byte of the lock that this process alone has."""
        for seat in range(SEATS_MAX):
            if self._lock.try_take(1 + seat):
                return seat
        raise RunBusyError("too many processes use the store of pages", facts={"path": self.path})

    def _is_alive(self, seat: int) -> bool:
        return seat == self.seat or self._lock.is_taken(1 + seat)

    def _is_alone(self) -> bool:
        return not any(self._lock.is_taken(1 + seat) for seat in range(SEATS_MAX))

    def _geometry(self, capacity: int, size: int) -> Geometry:
        """The slots of the store, as its first process has made them, or as this one does."""
        path = f"{self.path}/{_ABOUT}"
        wanted = Geometry.of(capacity, size)
        try:
            with open(path, "rb") as found:
                about = json.loads(found.read(4096))
            made = Geometry(**about["geometry"])
        except FileNotFoundError:
            _check_empty(self.path)
            _check_disk(self.path, capacity)
            content = {"format": FORMAT, "geometry": asdict(wanted)}
            replace_file(path, json.dumps(content).encode())
            return wanted
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _no_store(self.path) from error
        if about["format"] != FORMAT:
            raise FormatVersionError(
                "another version of statehold has made the store of pages",
                facts={"path": path, "expected": FORMAT, "got": about["format"]},
                hint="use another directory, or delete this one: its pages are computed again",
            )
        if made != wanted:
            raise UsageError(
                "the store of pages has other slots",
                facts={"path": self.path, "expected": _told(made), "got": _told(wanted)},
                hint="give the page_bytes and capacity that it was made with, or another directory",
            )
        return made

    def _recover(self) -> None:
        """Make good what dead processes and a loss of power have left."""
        table, now = self.files.table, boot()
        is_new, is_alone = table.is_new, self._is_alone()
        if not is_alone and table.boot != now:
            raise RunBusyError(
                "another host uses the store of pages",
                facts={"path": self.path},
                hint="give each host a directory on its own disk",
            )
        if is_new:
            table.create()
        # A table that was flushed before the power was lost may be older than the pages.
        is_old = is_new or table.boot not in (0, now)
        table.boot = now
        with self.changing(None):
            for slot in self.memory.table.clear_seats(self._is_alive):
                self.memory.table.release(slot)
            table.clear_seats(self._is_alive)
            if is_new:
                self._adopt_all()
        if is_old:
            table.mend()

    def _adopt_all(self) -> None:
        """Find the pages in segments whose table is gone."""
        table, count = self.files.table, self.files.slots_on_disk()
        for first in range(0, count, HEADERS):
            slots = range(first, min(first + HEADERS, count))
            for slot, raw in zip(slots, self._headers(slots), strict=True):
                header = Header.decode(raw)
                if header is not None:
                    space = table.space(header.identity)
                    table.adopt(slot, header.index, header.before, space, header.score)
                    table.saw_serial(header.serial)

    def _headers(self, slots: range) -> list[bytes]:
        """The first bytes of slots; empty where the storage fails."""
        memory = bytearray(len(slots) * HEADER_BYTES)
        files, offsets = zip(
            *(self.files.file(slot, is_write=False) for slot in slots), strict=True
        )
        at = address_of(memoryview(memory))
        try:
            self._engine.ranges(
                write=False,
                files=list(files),
                file_index=array("Q", range(len(slots))),
                offsets=array("Q", offsets),
                sizes=array("Q", [HEADER_BYTES] * len(slots)),
                addresses=array("Q", range(at, at + len(memory), HEADER_BYTES)),
                owner=memory,
                client=Client.PAGE_READ,
                verified=False,
            ).wait(None)
        except StateholdError as error:
            self.warn("read", error)
            return [b""] * len(slots)
        return [bytes(memory[i : i + HEADER_BYTES]) for i in range(0, len(memory), HEADER_BYTES)]


def address_of(view: memoryview) -> int:
    """Of the first byte of memory that may be written; 0 if there is none."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def _name(path: str) -> str:
    found = os.stat(path)
    return hashlib.sha256(f"{found.st_dev} {found.st_ino}".encode()).hexdigest()[:16]


def _check_empty(path: str) -> None:
    if set(os.listdir(path)) - {_LOCK}:
        raise _no_store(path)


def _check_disk(path: str, capacity: int) -> None:
    found = os.statvfs(path)
    if capacity > found.f_blocks * found.f_frsize:
        raise UsageError(
            "the capacity of a store of pages is larger than its disk",
            facts={
                "path": path,
                "expected": f"at most {format_bytes(found.f_blocks * found.f_frsize)}",
                "got": format_bytes(capacity),
            },
        )


def _no_store(path: str) -> UsageError:
    return UsageError(
        "the directory holds something else than pages",
        facts={"path": path},
        hint="give a directory that is empty or does not exist",
    )


def _told(geometry: Geometry) -> str:
    return f"{geometry.slots} slots of {format_bytes(geometry.slot_bytes)}"


def _late(path: str) -> WaitTimeout:
    return WaitTimeout("another process holds the tables of the store", facts={"path": path})
