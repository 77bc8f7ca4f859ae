"""PageStore: pages of a KV cache, in memory that a host shares and in files below it.

    put   caller's memory -> slot in memory (from now on all processes find it) -> slot in a file
    get   slot in memory -> caller's memory; before that, slot in a file -> slot in memory, verified

Three threads: one takes pages in, one writes them, one reads. A call only queues its work, and its
Batch ends in time, whatever the storage does. contains() asks the tables alone.

Invariants: a page is right, or it is a miss. What comes from a file is taken only if its header has
the asked key under this identity, and its payload the header's checksum. What comes from memory is
taken only if its slot was not given to another page meanwhile. A page is found only after its bytes
are there. A slot that a process fills, writes or reads into is not given away, and what a dead
process was filling is free again. If the storage refuses, the store goes on in memory, and warns
once.
Not here: bytes of a page (page), which page goes first (table), where slots are (tiers).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import (
    ClosedError,
    FormatVersionError,
    RunBusyError,
    StateholdError,
    StorageError,
    UsageError,
    WaitTimeout,
    shown,
)
from statehold.io.clients import Client, open_engine
from statehold.kv.batch import Batch, Verdict
from statehold.kv.page import (
    HEADER_BYTES,
    IDENTITY_BYTES,
    Header,
    check_key,
    index_of,
    slot_bytes,
    whole_blocks,
)
from statehold.kv.table import SEATS_MAX
from statehold.kv.tiers import FileTier, Geometry, MemoryTier, boot
from statehold.process.file_locks import LockFile
from statehold.process.ownership import make_own_directory
from statehold.process.whole_files import replace_file
from statehold.process.worker import Worker
from statehold.units import MiB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from statehold._core import RangesJob

logger = logging.getLogger("statehold")

FORMAT = 1
# Pages that one call reads, or writes, at a time.
LOADS_MAX = 64
DEADLINE_S = 1.0
BUFFER_BYTES = 1 * MiB
# Pages older than this survive a loss of power.
FLUSH_S = 1.0

_ABOUT = "store.json"
_LOCK = ".lock"
_TABLES = 0  # the byte that is locked around changes; those behind it are the seats
_LOCK_S = 1.0


@dataclass(slots=True)
class Loading:
    """A page on its way from a file. slot: in memory, FILLING."""

    batch: Batch
    place: int
    key: bytes
    into: memoryview
    slot: int
    there: int
    generation: int
    job: RangesJob | None = None


@dataclass(slots=True)
class Taking:
    """A page on its way into a slot in memory."""

    batch: Batch
    place: int
    key: bytes
    view: memoryview
    index: int
    before: int
    slot: int = -1
    serial: int = 0


class PageStore:
    """Pages of equal size in the directory `path`, which is made if need be.

    Args:
        path: a directory of this user, on a disk of this host.
        page_bytes: the most bytes of a page. All processes that open the store give the same.
        capacity: the most bytes of files, of which nothing takes more.
        memory: the memory for pages, which all processes of the host share; the first one decides.
        identity: what the pages depend on, 16 bytes (see statehold.kv.identity). Pages of another
            identity are not found, and go first.
        deadline_s: how long a call waits for its pages unless it says otherwise.

    Raises:
        UsageError: an argument makes no sense; the error says which.
        RunBusyError: another host uses the store, or too many processes do.
        FormatVersionError: another version of statehold has made the store.
        StorageError: the directory cannot be used.

    Thread-safe.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        page_bytes: int | str,
        capacity: int | str = "16GiB",
        memory: int | str = "1GiB",
        identity: bytes = bytes(IDENTITY_BYTES),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.page_bytes = parse_bytes(page_bytes)
        self.deadline_s = deadline_s
        self._identity = _check_identity(identity)
        self._guard = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._warned = set[str]()
        self._is_flush_due = False
        self._leftover: deque[Loading] = deque()
        self._is_closed = False
        with contextlib.ExitStack() as opened:
            make_own_directory(self.path, "of a store of pages")
            size = slot_bytes(self.page_bytes)
            self._lock = LockFile(f"{self.path}/{_LOCK}")
            opened.callback(self._lock.close)
            self._seat = self._sit()
            self._fs = _core.open_fs()
            opened.callback(self._fs.close)
            self._engine = open_engine(self._fs, 2 * BUFFER_BYTES, BUFFER_BYTES, 2)
            opened.callback(self._engine.close)
            with self._held(None):
                geometry = self._geometry(parse_bytes(capacity), size)
                self._files = FileTier(self._fs, self.path, geometry)
                opened.callback(lambda: self._files.close(is_last=self._is_alone()))
                self._memory = MemoryTier(_name(self.path), parse_bytes(memory), size)
                opened.callback(lambda: self._memory.close(is_last=self._is_alone()))
                self._recover()
            self._use(self._identity)
            self._take_in, self._write, self._read = (
                Worker(f"statehold-kv-{name}") for name in ("take-in", "write", "read")
            )
            self._opened = opened.pop_all()

    # -- calls -----------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are there, as far as the tables know. Waits for nothing."""
        identity, memory, files = self._identity, self._memory.table.find, self._files.table.find
        indices = [_core.xxh3_64(identity + key) for key in keys]
        return [memory(index) >= 0 or files(index) >= 0 for index in indices]

    def get(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview | bytearray],
        *,
        deadline_s: float | None = None,
    ) -> Batch:
        """Begin to read pages, each `into` memory of its size.

        Verdicts: HIT, MISS, LATE, BAD. Only after HIT the memory has the page; otherwise it is as
        it was. Keys are in the order of the prefix: each follows the one before.
        """
        views = [_writable(each) for each in into]
        self._check(keys, views)
        batch = self._batch(len(keys), deadline_s)
        identity = self._identity
        self._submit(self._read, batch, lambda: self._load(batch, identity, list(keys), views))
        return batch

    def put(
        self,
        keys: Sequence[bytes],
        pages: Sequence[memoryview | bytes],
        *,
        after: bytes | None = None,
        deadline_s: float | None = None,
    ) -> Batch:
        """Begin to store pages. The caller leaves their memory unchanged until the verdicts.

        Verdicts: STORED, HIT (it was there), DROPPED, LATE. Keys are in the order of the prefix;
        `after` is the key before the first one.
        """
        views = [memoryview(each).cast("B") for each in pages]
        self._check(keys, views)
        batch = self._batch(len(keys), deadline_s)
        identity = self._identity
        first = 0 if after is None else index_of(identity, check_key(after))
        accept = partial(self._accept, batch, identity, list(keys), views, first)
        self._submit(self._take_in, batch, accept)
        return batch

    def flush(self) -> None:
        """Return once all pages that were put are in files, or were dropped, and are durable.

        Raises StorageError if they cannot be made durable.
        """
        self._take_in.passed(None)
        self._write.passed(None)
        try:
            self._files.flush()
        except OSError as error:
            raise StorageError(
                "pages are not durable", errno=error.errno, path=self.path
            ) from error

    @property
    def identity(self) -> bytes:
        """What the pages depend on."""
        return self._identity

    @identity.setter
    def identity(self, identity: bytes) -> None:
        # First, so that no page of the old one is found from now on.
        self._identity = _check_identity(identity)
        self._use(identity)

    def stats(self) -> Mapping[str, int]:
        """hits, misses, late, bad, stored, dropped: verdicts of this process. evicted: pages that
        went from files, of all processes. pages and memory_pages: how many there are."""
        found = {each: self._counts[each] for each in
                 ("hits", "misses", "late", "bad", "stored", "dropped")}  # fmt: skip
        found["evicted"] = self._files.table.evicted
        found["pages"], found["memory_pages"] = (
            tier.table.pages() for tier in (self._files, self._memory)
        )
        return found

    def close(self) -> None:
        """Write what was put, and let the store go. Idempotent."""
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
        for worker in (self._take_in, self._write, self._read):
            worker.close()
        for loading in self._leftover:
            if loading.job is not None:
                loading.job.cancel()
        with contextlib.suppress(StateholdError), self._changing(_LOCK_S):
            self._memory.table.seat(self._seat, None)
            self._files.table.seat(self._seat, None)
        self._opened.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading ---------------------------------------------------------------------------

    def _load(
        self, batch: Batch, identity: bytes, keys: list[bytes], views: list[memoryview]
    ) -> None:
        self._reap()
        absent = self._from_memory(batch, identity, keys, views)
        self._from_files(batch, identity, absent)

    def _from_memory(
        self, batch: Batch, identity: bytes, keys: list[bytes], views: list[memoryview]
    ) -> list[tuple[int, bytes, memoryview]]:
        """Deliver what is in memory; returns the places, keys and memory of the others."""
        table, absent, used = self._memory.table, [], []
        for place, (key, view) in enumerate(zip(keys, views, strict=True)):
            slot = table.find(index_of(identity, key))
            if slot < 0 or not self._deliver(batch, place, identity, key, view, slot):
                absent.append((place, key, view))
            else:
                used.append(slot)
        with self._changing(batch.until - time.monotonic()):
            table.touch(reversed(used))
        return absent

    def _deliver(
        self, batch: Batch, place: int, identity: bytes, key: bytes, view: memoryview, slot: int
    ) -> bool:
        """Copy a page from a slot in memory, which may be given to another one meanwhile."""
        table = self._memory.table
        generation = table.generation(slot)
        header = Header.decode(self._memory.header(slot))
        if header is None or not header.is_of(identity, key, view.nbytes):
            return False
        source = self._memory.address(slot) + HEADER_BYTES
        if not batch.move(place, lambda: _copy(_address(view), source, view.nbytes)):
            return True  # it is late, and has its verdict
        if table.generation(slot) != generation or table.index(slot) != header.index:
            return False
        self._verdict(batch, place, Verdict.HIT)
        return True

    def _from_files(
        self, batch: Batch, identity: bytes, absent: list[tuple[int, bytes, memoryview]]
    ) -> None:
        waiting, under_way = deque(absent), deque[Loading]()
        while waiting or under_way:
            self._start(batch, identity, waiting, under_way)
            if not under_way:  # other loads have all the memory
                break
            self._finish(under_way.popleft(), identity)

    def _start(
        self,
        batch: Batch,
        identity: bytes,
        waiting: deque[tuple[int, bytes, memoryview]],
        under_way: deque[Loading],
    ) -> None:
        if not waiting or len(under_way) > LOADS_MAX // 2:
            return
        memory, files, new = self._memory.table, self._files.table, list[Loading]()
        with self._changing(batch.until - time.monotonic()):
            while waiting and len(under_way) + len(new) < LOADS_MAX:
                place, key, view = waiting[0]
                there = files.find(index_of(identity, key))
                slot = -1 if there < 0 else memory.take(self._seat)
                if there >= 0 and slot < 0:
                    break
                waiting.popleft()
                if there < 0:
                    self._verdict(batch, place, Verdict.MISS)
                else:
                    generation = files.generation(there)
                    new.append(Loading(batch, place, key, view, slot, there, generation))
            files.touch(loading.there for loading in reversed(new))
        for loading in new:
            try:
                loading.job = self._job(loading.slot, loading.there, loading.into.nbytes)
            except StorageError as error:
                self._warn("read", error)
            under_way.append(loading)

    def _job(self, slot: int, there: int, nbytes: int, *, is_write: bool = False) -> RangesJob:
        file, at = self._files.file(there, is_write=is_write)
        address, payload = self._memory.address(slot), whole_blocks(nbytes)
        return self._engine.ranges(
            write=is_write,
            files=[file],
            file_index=array("Q", [0, 0]),
            offsets=array("Q", [at, at + HEADER_BYTES]),
            sizes=array("Q", [HEADER_BYTES, payload]),
            addresses=array("Q", [address, address + HEADER_BYTES]),
            owner=self._memory,
            client=Client.PAGE_WRITE if is_write else Client.PAGE_READ,
            transfer_bytes=self._files.slot_bytes,
            verified=is_write,
        )

    def _finish(self, loading: Loading, identity: bytes) -> None:
        """Wait for a page from a file, and deliver it."""
        is_read, job = False, loading.job
        if job is not None:
            try:
                if not job.wait(max(0.0, loading.batch.until - time.monotonic())):
                    self._leftover.append(loading)  # its slot is in use
                    return
                is_read = True
            except StateholdError as error:
                self._warn("read", error)
        self._settle(loading, identity, is_read)

    def _settle(self, loading: Loading, identity: bytes, is_read: bool) -> None:
        batch, place, view, slot = loading.batch, loading.place, loading.into, loading.slot
        header = self._proven(loading, identity) if is_read else None
        is_right = header is not None and header.is_of(identity, loading.key, view.nbytes)
        if is_right:
            source = self._memory.address(slot) + HEADER_BYTES
            batch.move(place, lambda: _copy(_address(view), source, view.nbytes))
        is_same = False
        with self._changing(None):
            memory, files = self._memory.table, self._files.table
            space = memory.space(identity)
            if header is None or not memory.publish(slot, header.index, header.before, space):
                memory.free(slot)
            is_same = files.generation(loading.there) == loading.generation
            if header is None and is_same:
                files.free(loading.there)
        if is_right:
            self._verdict(batch, place, Verdict.HIT)
        else:
            self._verdict(batch, place, Verdict.BAD if header is None and is_same else Verdict.MISS)

    def _proven(self, loading: Loading, identity: bytes) -> Header | None:
        """The header of what was read, if it and the payload are right for the key."""
        header = Header.decode(self._memory.header(loading.slot))
        if header is None or (header.identity, header.key) != (identity, loading.key):
            return None
        if loading.job is None or whole_blocks(header.nbytes) != whole_blocks(loading.into.nbytes):
            return None
        checksum = memoryview(loading.job.checksums()).cast("Q")[1]
        return header if checksum == header.checksum else None

    def _reap(self) -> None:
        """Let go of loads that were late and are done by now."""
        for _ in range(len(self._leftover)):
            loading = self._leftover.popleft()
            is_read = False
            if loading.job is not None:
                with contextlib.suppress(StateholdError):
                    if not loading.job.wait(0.0):
                        self._leftover.append(loading)
                        continue
                    is_read = True
            self._settle(loading, self._identity, is_read)

    # -- writing ---------------------------------------------------------------------------

    def _accept(
        self,
        batch: Batch,
        identity: bytes,
        keys: list[bytes],
        views: list[memoryview],
        before: int,
    ) -> None:
        indices = [index_of(identity, key) for key in keys]
        waiting = deque(
            Taking(batch, place, key, view, index, parent)
            for place, (key, view, index, parent) in enumerate(
                zip(keys, views, indices, [before, *indices[:-1]], strict=True)
            )
        )
        while waiting:
            taken = self._take(batch, waiting)
            if not taken and waiting and not self._write.passed(batch.until):
                return  # they are late
            if not taken and waiting and not (taken := self._take(batch, waiting)):
                break
            self._publish(identity, taken)
        for page in waiting:  # other processes have all the memory
            self._verdict(batch, page.place, Verdict.DROPPED)

    def _take(self, batch: Batch, waiting: deque[Taking]) -> list[Taking]:
        """The next pages that need a slot, each with one, as far as there are slots."""
        memory, files, taken = self._memory.table, self._files.table, list[Taking]()
        with self._changing(batch.until - time.monotonic()):
            while waiting:
                page = waiting[0]
                if memory.find(page.index) >= 0 or files.find(page.index) >= 0:
                    self._verdict(batch, page.place, Verdict.HIT)
                elif (slot := memory.take(self._seat)) >= 0:
                    page.slot, page.serial = slot, files.next_serial()
                    taken.append(page)
                else:
                    break
                waiting.popleft()
        return taken

    def _publish(self, identity: bytes, taken: list[Taking]) -> None:
        """Fill slots in memory, let everybody find them, and have them written."""
        filled = {page.slot for page in taken if self._fill(page, identity)}
        stored, memory = list[int](), self._memory.table
        with self._changing(None):
            space = memory.space(identity)
            for page in taken:
                slot = page.slot
                if slot in filled and memory.publish(slot, page.index, page.before, space):
                    memory.hold(slot, self._seat)
                    stored.append(slot)
                else:
                    memory.free(slot)
        self._write.submit(lambda: self._store(stored))
        for page in taken:
            self._verdict(page.batch, page.place, Verdict.STORED)

    def _fill(self, page: Taking, identity: bytes) -> bool:
        """Copy a page to its slot, unless it is late."""
        at, nbytes = self._memory.address(page.slot) + HEADER_BYTES, page.view.nbytes

        def copy() -> None:
            if page.view.readonly:
                self._memory.payload(page.slot, nbytes)[:] = page.view
            else:
                _copy(at, _address(page.view), nbytes)

        if not page.batch.move(page.place, copy):
            return False
        ctypes.memset(at + nbytes, 0, whole_blocks(nbytes) - nbytes)
        checksum = _core.hash_memory(at, whole_blocks(nbytes))
        header = Header(identity, page.key, nbytes, checksum, page.serial, page.before)
        self._memory.write_header(page.slot, header.encode())
        return True

    def _store(self, slots: list[int]) -> None:
        for first in range(0, len(slots), LOADS_MAX):
            self._store_some(slots[first : first + LOADS_MAX])
        if not self._is_flush_due:
            self._is_flush_due = True
            timer = threading.Timer(FLUSH_S, self._flush_later)
            timer.daemon = True
            timer.start()

    def _store_some(self, slots: list[int]) -> None:
        memory, files = self._memory.table, self._files.table
        headers = {slot: Header.decode(self._memory.header(slot)) for slot in slots}
        jobs: dict[int, tuple[int, RangesJob | None]] = {}
        with self._changing(None):
            for slot in slots:
                there = files.take(self._seat, self._files.below)
                if there >= 0:
                    jobs[slot] = there, self._begin_write(slot, there, headers[slot])
        done = {slot for slot, (_, job) in jobs.items() if self._is_written(job)}
        with self._changing(None):
            for slot in slots:
                there = jobs[slot][0] if slot in jobs else -1
                header = headers[slot]
                if slot in done and header is not None:
                    space = files.space(header.identity)
                    if not files.publish(there, header.index, header.before, space):
                        files.free(there)
                elif there >= 0:
                    files.free(there)
                memory.release(slot)
        self._counts["unwritten"] += len(slots) - len(done)

    def _begin_write(self, slot: int, there: int, header: Header | None) -> RangesJob | None:
        if header is None:
            return None
        try:
            return self._job(slot, there, header.nbytes, is_write=True)
        except StorageError as error:
            self._warn("write", error)
            return None

    def _is_written(self, job: RangesJob | None) -> bool:
        if job is None:
            return False
        try:
            return job.wait(None)
        except StorageError as error:
            self._warn("write", error)
            return False

    def _flush_later(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile, and flushed
            self._write.submit(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_due = False
        try:
            self._files.flush()
        except (OSError, StorageError) as error:
            self._warn("flush", error)

    # -- the tables ------------------------------------------------------------------------

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
    def _changing(self, timeout_s: float | None) -> Iterator[None]:
        with self._held(timeout_s), self._memory.table.change(), self._files.table.change():
            yield

    def _use(self, identity: bytes) -> None:
        with self._changing(None):
            for tier in (self._memory, self._files):
                tier.table.seat(self._seat, tier.table.space(identity))

    def _sit(self) -> int:
        """A seat of the store: a byte of the lock that this process alone has."""
        for seat in range(SEATS_MAX):
            if self._lock.try_take(1 + seat):
                return seat
        raise RunBusyError("too many processes use the store of pages", facts={"path": self.path})

    def _is_alive(self, seat: int) -> bool:
        return seat == self._seat or self._lock.is_taken(1 + seat)

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
        table, now = self._files.table, boot()
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
        with self._changing(None):
            for slot in self._memory.table.clear_seats(self._is_alive):
                self._memory.table.release(slot)
            table.clear_seats(self._is_alive)
            if is_new:
                self._adopt_all()
        if is_old:
            table.mend()

    def _adopt_all(self) -> None:
        """Find the pages in segments whose table is gone."""
        table, count = self._files.table, self._files.slots_on_disk()
        for first in range(0, count, LOADS_MAX):
            slots = range(first, min(first + LOADS_MAX, count))
            for slot, raw in zip(slots, self._headers(slots), strict=True):
                header = Header.decode(raw)
                if header is not None:
                    space = table.space(header.identity)
                    table.adopt(slot, header.index, header.before, space)
                    table.saw_serial(header.serial)

    def _headers(self, slots: range) -> list[bytes]:
        """The first bytes of slots; empty where the storage fails."""
        memory = bytearray(len(slots) * HEADER_BYTES)
        files, offsets = zip(
            *(self._files.file(slot, is_write=False) for slot in slots), strict=True
        )
        at = _address(memoryview(memory))
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
            self._warn("read", error)
            return [b""] * len(slots)
        return [bytes(memory[i : i + HEADER_BYTES]) for i in range(0, len(memory), HEADER_BYTES)]

    # -- small things ----------------------------------------------------------------------

    def _batch(self, count: int, deadline_s: float | None) -> Batch:
        if self._is_closed:
            raise ClosedError("the store of pages is closed", facts={"path": self.path})
        return Batch(
            count, time.monotonic() + (deadline_s if deadline_s is not None else self.deadline_s)
        )

    def _check(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> None:
        if len(keys) != len(views):
            facts = {"expected": f"{len(keys)} buffers", "got": len(views)}
            raise UsageError("as many buffers as keys are needed", facts=facts)
        for key, view in zip(keys, views, strict=True):
            check_key(key)
            if view.nbytes > self.page_bytes:
                facts = {"expected": f"at most {self.page_bytes} bytes", "got": view.nbytes}
                raise UsageError("a page is too large for the store", facts=facts)

    def _submit(self, worker: Worker, batch: Batch, action: Callable[[], None]) -> None:
        """Queue the work of a call. What stops it is logged, and its pages are a miss."""

        def guarded() -> None:
            try:
                action()
            except WaitTimeout:
                pass  # another process holds the tables; the pages are late
            except Exception:
                logger.exception("the store of pages %s has failed", self.path)
                for place in range(batch.count):
                    batch.settle(place, Verdict.MISS)

        worker.submit(guarded)

    def _verdict(self, batch: Batch, place: int, verdict: Verdict) -> None:
        if batch.settle(place, verdict):
            self._counts[_COUNTED[verdict]] += 1
        else:
            self._counts["late"] += 1

    def _warn(self, action: str, error: Exception) -> None:
        if action not in self._warned:
            self._warned.add(action)
            logger.warning(
                "the store of pages %s could not %s a page; it goes on with those that it can\n%s",
                self.path, action, error,
            )  # fmt: skip


_COUNTED = {
    Verdict.HIT: "hits",
    Verdict.MISS: "misses",
    Verdict.LATE: "late",
    Verdict.BAD: "bad",
    Verdict.STORED: "stored",
    Verdict.DROPPED: "dropped",
}


def _name(path: str) -> str:
    found = os.stat(path)
    return hashlib.sha256(f"{found.st_dev} {found.st_ino}".encode()).hexdigest()[:16]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def _copy(to: int, source: int, nbytes: int) -> None:
    ctypes.memmove(to, source, nbytes)


def _writable(memory: memoryview | bytearray) -> memoryview:
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous:
        raise UsageError("pages are read into contiguous memory that may be written")
    return view.cast("B")


def _check_identity(identity: object) -> bytes:
    if isinstance(identity, bytes) and len(identity) == IDENTITY_BYTES:
        return identity
    raise UsageError(
        "not an identity",
        facts={"expected": f"{IDENTITY_BYTES} bytes", "got": shown(identity)},
        hint="statehold.kv.identity() makes one",
    )


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
