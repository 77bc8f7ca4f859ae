"""A store of pages that a process has opened: its tiers, its seat, and the lock of the tables.

    STORE/.lock     bytes: around changes of the tables; a seat each; who sends; who makes a segment

Invariants: what a dead process was filling is free again when the next one opens the store. A table
that is lost, or older than the pages because the host has lost its power, is made again: from the
entries of the slots and from headers, or from its columns. What a dead process has put into memory,
and not into files, is written by the next one (`unwritten`). All processes are on one host, because
they share memory.
Pages pass through buffers of the engine, which are huge pages: a disk moves these several times as
fast as the small pages of shared memory.
Not here: pages on their way (store), the tables (native/page_table.h), their memory and files
(tiers).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from statehold import _core
from statehold._core import SEATS_MAX, SPACES_MAX, File, PageTable, RangesJob
from statehold.errors import RunBusyError, StateholdError, WaitTimeout, refused, storing
from statehold.io.clients import Client, open_engine
from statehold.kv.page import HEADER_BYTES, Header, slot_bytes, whole_blocks
from statehold.kv.tiers import LOCK, FileTier, Geometry, MemoryTier, boot, no_store, touch
from statehold.process.file_locks import LockFile
from statehold.process.ownership import make_own_directory
from statehold.process.warn import logger
from statehold.units import GiB, KiB, MiB, format_bytes

# So many large requests keep a disk busy in each direction.
BUFFER_BYTES, BUFFERS = 2 * MiB, 8
# Headers are read so many bytes at a time. Small slots are read whole: a disk is faster with that
# than with so many small pieces.
HEADERS_BYTES, WHOLE_BYTES = 16 * MiB, 32 * KiB

# A page: its slot in memory, its slot in a file, its bytes.
Move = tuple[int, int, int]

_TABLES = 0
# How long the constructor, close() and a new identity wait for a process that holds the tables.
LOCK_S = 10.0
# The first process makes the memory under the lock, at least so fast, and the others wait for it.
MADE_A_S = GiB


class OpenStore:
    """The store in the directory `path`, for one process. Raises as PageStore does."""

    def __init__(
        self, path: str, *, page_bytes: int, capacity: int, memory: int, identity: bytes
    ) -> None:
        self.path, self._guard, self._warned = path, threading.RLock(), set[str]()
        with contextlib.ExitStack() as opened:
            make_own_directory(path, "of a store of pages")
            size = slot_bytes(page_bytes)
            with storing("lock a store of pages", f"{path}/{LOCK}"):
                self._lock = LockFile(f"{path}/{LOCK}")
            opened.callback(self._lock.close)
            fs = _core.open_fs()
            opened.callback(fs.close)
            # Whole slots, unless they are large.
            buffer = round(BUFFER_BYTES / size) * size or BUFFER_BYTES
            self._engine = open_engine(fs, BUFFERS * buffer, buffer, 2)
            opened.callback(self._engine.close)
            self._tiers = opened.enter_context(contextlib.ExitStack())
            with held(self._lock, LOCK_S + memory / MADE_A_S, self._guard):
                self.seat = self._sit()
                self.files = FileTier(fs, path, _geometry(path, capacity, size))
                self._tiers.callback(lambda: self.files.leave(is_last=is_unused(self._lock)))
                self.memory = MemoryTier(path, memory, size)
                self._tiers.callback(lambda: self.memory.leave(is_last=is_unused(self._lock)))
                self._recover()
            touch(self.memory.map)  # without the lock: it takes a second for 13 GB
            self.use(identity)
            self._opened = opened.pop_all()

    def close(self, filling: Iterable[int] = ()) -> None:
        """Give up the seat, the memory and the files. Nothing uses them any more.

        filling: slots in memory that this process has taken, and that hold nothing.
        """
        with contextlib.suppress(WaitTimeout), held(self._lock, LOCK_S, self._guard):
            with self._marked():
                for slot in filling:
                    self.memory.table.free(slot)
                self.memory.table.seat(self.seat, None)
                self.files.table.seat(self.seat, None)
            # Under the lock: who has a seat has the store open.
            self._tiers.close()
            self._lock.drop(1 + self.seat)
        self._opened.close()

    def use(self, identity: bytes) -> None:
        """This process uses the pages of an identity, so they go last.

        Raises RunBusyError if there is no room for an identity more, and WaitTimeout.
        """
        with self.changing(LOCK_S):
            tables = self.memory.table, self.files.table
            for table in tables:
                table.seat(self.seat, None)  # its identity before is one fewer
            spaces = [table.space(identity) for table in tables]
            for table, space in zip(tables, spaces, strict=True):
                table.seat(self.seat, None if space < 0 else space)
        if min(spaces) < 0:
            text = "the processes that use the store of pages have too many identities"
            expected, got = f"at most {SPACES_MAX} identities at a time", f"{SPACES_MAX} others"
            safe = "the pages of the others; those of this identity are dropped"
            facts = {"path": self.path, "expected": expected, "got": got, "still safe": safe}
            raise RunBusyError(text, facts=facts, hint="give this identity a directory of its own")

    def flush(self) -> None:
        """Make durable what was written. Raises StorageError."""
        with storing("flush pages", self.path):
            self.files.flush()

    def warn(self, action: str, error: object, what: str = "a page") -> None:
        """Log what the storage refuses, once for each kind of action."""
        if action not in self._warned:
            self._warned.add(action)
            logger.warning(
                "the store of pages %s could not %s %s; it goes on with those that it can\n%s",
                self.path, action, what, error,
            )  # fmt: skip

    def pages_in(self, slots: Sequence[int]) -> list[tuple[Header, memoryview]]:
        """What these slots of files hold, as far as it is right: of each its header and bytes."""
        size, found = self.files.slot_bytes, list[tuple[Header, memoryview]]()
        memory = memoryview(mmap.mmap(-1, size * len(slots)))
        at = address_of(memory)
        parts = [(slot, 0, size, at + n * size) for n, slot in enumerate(slots)]
        try:
            self._begin(parts, memory).wait(None)
        except StateholdError as error:
            self.warn("read", error)
            return found
        for begin in range(0, len(memory), size):
            raw = memory[begin : begin + size].toreadonly()
            if header := Header.proven(raw):
                found.append((header, raw[: HEADER_BYTES + whole_blocks(header.nbytes)]))
        return found

    def left_behind(self) -> list[tuple[int, int]]:
        """The slot and the index of each page in files, unless another process sends them."""
        if not self._lock.try_take(1 + SEATS_MAX):
            return []
        table = self.files.table
        indices = list(map(table.index, range(table.slots)))
        found = enumerate(zip(indices, table.find_all(indices), strict=True))
        return [(slot, index) for slot, (index, there) in found if slot == there]

    def job(self, moves: Sequence[Move], *, is_write: bool = False) -> RangesJob:
        """Begin to move pages between their slots in memory and in files. Raises StorageError."""
        parts = list[tuple[int, int, int, int]]()
        for slot, there, nbytes in moves:
            address = self.memory.address(slot)
            # A page that is read needs the checksum of its payload alone.
            header = 0 if is_write else HEADER_BYTES
            if header:
                parts.append((there, 0, header, address))
            whole = HEADER_BYTES + whole_blocks(nbytes) - header
            parts.append((there, header, whole, address + header))
        return self._begin(parts, self.memory, is_write=is_write)

    def _begin(
        self, parts: Sequence[tuple[int, int, int, int]], owner: object, *, is_write: bool = False,
        is_staged: bool = True,
    ) -> RangesJob:  # fmt: skip
        """parts: a slot in a file, where in it, how many bytes, and their address in memory."""
        files, numbers = list[File](), list[int]()
        starts, sizes, addresses = (array("Q") for _ in range(3))
        for there, skip, nbytes, address in parts:
            file, at = self.files.file(there, is_write=is_write)
            if not files or files[-1] is not file:
                files.append(file)
            numbers.append(len(files) - 1)
            starts.append(at + skip)
            sizes.append(nbytes)
            addresses.append(address)
        return self._engine.ranges(
            write=is_write, files=files, file_index=array("Q", numbers), offsets=starts,
            sizes=sizes, addresses=addresses, owner=owner, verified=False, staged=is_staged,
            client=Client.PAGE_WRITE if is_write else Client.PAGE_READ,
        )  # fmt: skip

    @contextlib.contextmanager
    def changing(self, timeout_s: float | None) -> Iterator[None]:
        """Around changes of the tables, which no other process changes then. Raises WaitTimeout."""
        with held(self._lock, timeout_s, self._guard), self._marked():
            yield

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Around changes, under the lock. An exception leaves the tables torn; the next change
        mends them."""
        for tier in (self.memory, self.files):
            tier.table.begin_change(int(time.time()))
        yield
        for tier in (self.memory, self.files):
            tier.table.end_change()

    def _sit(self) -> int:
        """A seat of the store: a byte of the lock that this process alone has."""
        for seat in range(SEATS_MAX):
            if self._lock.try_take(1 + seat):
                return seat
        raise RunBusyError("too many processes use the store of pages", facts={"path": self.path})

    def _recover(self) -> None:
        """Make good what dead processes and a loss of power have left."""
        table, now = self.files.table, boot()
        is_new = table.is_new
        refuse_other_host(table, self._lock)
        if is_new:
            table.create()
        # A table that was flushed before the power was lost may be older than the pages.
        is_old = is_new or table.boot not in (0, now)
        table.boot = now
        # What the tables have of this process's seat is of a dead one.
        dead = bytes(not self._lock.is_taken(1 + seat) for seat in range(SEATS_MAX))
        with self._marked():
            self.unwritten = self.memory.table.clear_seats(dead)
            for slot in self.unwritten:
                self.memory.table.release(slot)
                self.memory.table.hold(slot, self.seat)
            table.clear_seats(dead)
            if is_new:
                self._adopt_all()
        if is_old:
            table.mend()

    def _adopt_all(self) -> None:
        """Find the pages in segments whose table is gone. Slots that have no entry are read."""
        size, memory = self.files.slot_bytes, mmap.mmap(-1, HEADERS_BYTES)
        is_whole, at = size <= WHOLE_BYTES, address_of(memoryview(memory))
        stride = size if is_whole else HEADER_BYTES
        waiting = deque(self.files.adopt(HEADERS_BYTES // stride))
        while waiting:
            first, count = waiting.popleft()
            parts = [(first, 0, count * stride, at)]
            if not is_whole:
                parts = [(first + n, 0, stride, at + n * stride) for n in range(count)]
            try:
                self._begin(parts, memory, is_staged=is_whole).wait(None)
            except StateholdError as error:
                self.warn("read", error)
                if count > 1:  # some of them cannot be read
                    waiting += [(first, count // 2), (first + count // 2, count - count // 2)]
            else:
                self.files.table.adopt(first, memoryview(memory)[: count * stride], stride)
                self.files.note(range(first, first + count))


@contextlib.contextmanager
def held(lock: LockFile, timeout_s: float | None, guard: threading.RLock) -> Iterator[None]:
    """The lock of the tables. guard: of the threads that use `lock`. Raises WaitTimeout."""
    until = -1.0 if timeout_s is None else max(0.0, timeout_s)
    is_held = guard.acquire(timeout=until)
    try:
        if not (is_held and lock.take(_TABLES, timeout_s)):
            facts = {"path": os.path.dirname(lock.path)}
            raise WaitTimeout("another process holds the tables of the store", facts=facts)
        try:
            yield
        finally:
            lock.drop(_TABLES)
    finally:
        if is_held:
            guard.release()


def is_unused(lock: LockFile) -> bool:
    """Whether no other process has a seat of the store."""
    return not any(lock.is_taken(1 + seat) for seat in range(SEATS_MAX))


def refuse_other_host(table: PageTable, lock: LockFile) -> None:
    """Raises RunBusyError if processes of another host, whose memory is not here, use a table, or
    if this one is new and they have another, which is lost."""
    if table.boot != boot() and not is_unused(lock):
        lost = "processes that use the store of pages have an index that is lost"
        other = "another host uses the store of pages", "give each host a directory on its own disk"
        again = "end them: the next process makes the index again"
        text, hint = (lost, again) if table.is_new else other
        raise RunBusyError(text, facts={"path": os.path.dirname(lock.path)}, hint=hint)


def address_of(view: memoryview) -> int:
    """Of the first byte of memory that may be written; 0 if there is none."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def _geometry(path: str, capacity: int, size: int) -> Geometry:
    """The slots of the store, as its first process has made them, or as this one does."""
    wanted = Geometry.of(capacity, size)
    try:
        made = Geometry.read(path)
    except FileNotFoundError:
        if set(os.listdir(path)) - {LOCK}:
            raise no_store(path) from None
        disk = os.statvfs(path)
        most = disk.f_blocks * disk.f_frsize
        if capacity > most:
            summary = "the capacity of a store of pages is larger than its disk"
            expected, got = f"at most {format_bytes(most)}", format_bytes(capacity)
            raise refused(summary, expected, got, "give less", path=path) from None
        wanted.write(path)
        return wanted
    if made != wanted:
        hint = "give the page_bytes and capacity that it was made with, or another directory"
        raise refused("the store of pages has other slots", made, str(wanted), hint, path=path)
    return made
