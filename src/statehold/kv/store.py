"""PageStore: pages of a KV cache, in memory that a host shares and in files below it.

    put   caller's memory -> slot in memory (from now on all processes find it) -> slot in a file
    get   slot in memory -> caller's memory; before that, slot in a file -> slot in memory, verified

Three threads: one takes pages in, one writes them, one reads. A call only queues its work, and its
PageBatch ends in time, whatever the storage does. contains() asks the tables alone.

Invariants: a page is right, or it is a miss. What comes from a file is taken only if its header has
the asked key under this identity, and its payload the header's checksum. What comes from memory is
taken only if its slot was not given to another page meanwhile. A page is found only after its bytes
are there. A slot that a process fills, writes or reads into is not given away, and what a dead
process was filling is free again. If the storage refuses, the store goes on in memory, and warns
once.
Not here: bytes of a page (page), which page goes first (table), the tables' lock (opened).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import (
    ClosedError,
    StateholdError,
    StorageError,
    UsageError,
    WaitTimeout,
    shown,
)
from statehold.kv.batch import PageBatch, PageVerdict
from statehold.kv.opened import OpenStore, address_of
from statehold.kv.page import (
    HEADER_BYTES,
    IDENTITY_BYTES,
    Header,
    check_key,
    index_of,
    whole_blocks,
)
from statehold.process.worker import Worker
from statehold.units import parse_bytes

if TYPE_CHECKING:
    from statehold._core import RangesJob

logger = logging.getLogger("statehold")

# Pages that one call reads, or writes, at a time.
LOADS_MAX = 64
DEADLINE_S = 1.0
# Pages older than this survive a loss of power.
FLUSH_S = 1.0


@dataclass(slots=True)
class Loading:
    """A page on its way from a file. slot: in memory, FILLING."""

    batch: PageBatch
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

    batch: PageBatch
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
        self.page_bytes = parse_bytes(page_bytes)
        self.deadline_s = deadline_s
        self._identity = _check_identity(identity)
        self._counts: Counter[str] = Counter()
        self._is_flush_due = self._is_closed = False
        self._leftover: deque[Loading] = deque()
        self._open = OpenStore(
            os.path.abspath(os.fspath(path)),
            page_bytes=self.page_bytes,
            capacity=parse_bytes(capacity),
            memory=parse_bytes(memory),
        )
        self._memory, self._files = self._open.memory, self._open.files
        self._open.use(self._identity)
        self._take_in, self._write, self._read = (
            Worker(f"statehold-kv-{name}") for name in ("take-in", "write", "read")
        )

    @property
    def path(self) -> str:
        """The directory."""
        return self._open.path

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
    ) -> PageBatch:
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
    ) -> PageBatch:
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
        self._open.flush()

    @property
    def identity(self) -> bytes:
        """What the pages depend on."""
        return self._identity

    @identity.setter
    def identity(self, identity: bytes) -> None:
        # First, so that no page of the old one is found from now on.
        self._identity = _check_identity(identity)
        self._open.use(identity)

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
        if self._is_closed:
            return
        self._is_closed = True
        for worker in (self._take_in, self._write, self._read):
            worker.close()
        for loading in self._leftover:
            if loading.job is not None:
                loading.job.cancel()
        self._open.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading ---------------------------------------------------------------------------

    def _load(
        self, batch: PageBatch, identity: bytes, keys: list[bytes], views: list[memoryview]
    ) -> None:
        self._reap()
        absent = self._from_memory(batch, identity, keys, views)
        self._from_files(batch, identity, absent)

    def _from_memory(
        self, batch: PageBatch, identity: bytes, keys: list[bytes], views: list[memoryview]
    ) -> list[tuple[int, bytes, memoryview]]:
        """Deliver what is in memory; returns the places, keys and memory of the others."""
        table, absent, used = self._memory.table, [], []
        for place, (key, view) in enumerate(zip(keys, views, strict=True)):
            slot = table.find(index_of(identity, key))
            if slot < 0 or not self._deliver(batch, place, identity, key, view, slot):
                absent.append((place, key, view))
            else:
                used.append(slot)
        with self._open.changing(batch.until - time.monotonic()):
            table.touch(reversed(used))
        return absent

    def _deliver(
        self, batch: PageBatch, place: int, identity: bytes, key: bytes, view: memoryview, slot: int
    ) -> bool:
        """Copy a page from a slot in memory, which may be given to another one meanwhile."""
        table = self._memory.table
        generation = table.generation(slot)
        header = Header.decode(self._memory.header(slot))
        if header is None or not header.is_of(identity, key, view.nbytes):
            return False
        source = self._memory.address(slot) + HEADER_BYTES
        if not batch.move(place, lambda: _copy(address_of(view), source, view.nbytes)):
            return True  # it is late, and has its verdict
        if table.generation(slot) != generation or table.index(slot) != header.index:
            return False
        self._verdict(batch, place, PageVerdict.HIT)
        return True

    def _from_files(
        self, batch: PageBatch, identity: bytes, absent: list[tuple[int, bytes, memoryview]]
    ) -> None:
        waiting, under_way = deque(absent), deque[Loading]()
        while waiting or under_way:
            self._start(batch, identity, waiting, under_way)
            if not under_way:  # other loads have all the memory
                break
            self._finish(under_way.popleft(), identity)

    def _start(
        self,
        batch: PageBatch,
        identity: bytes,
        waiting: deque[tuple[int, bytes, memoryview]],
        under_way: deque[Loading],
    ) -> None:
        if not waiting or len(under_way) > LOADS_MAX // 2:
            return
        memory, files, new = self._memory.table, self._files.table, list[Loading]()
        with self._open.changing(batch.until - time.monotonic()):
            while waiting and len(under_way) + len(new) < LOADS_MAX:
                place, key, view = waiting[0]
                there = files.find(index_of(identity, key))
                slot = -1 if there < 0 else memory.take(self._open.seat)
                if there >= 0 and slot < 0:
                    break
                waiting.popleft()
                if there < 0:
                    self._verdict(batch, place, PageVerdict.MISS)
                else:
                    generation = files.generation(there)
                    new.append(Loading(batch, place, key, view, slot, there, generation))
            files.touch(loading.there for loading in reversed(new))
        for loading in new:
            try:
                loading.job = self._open.job(loading.slot, loading.there, loading.into.nbytes)
            except StorageError as error:
                self._open.warn("read", error)
            under_way.append(loading)

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
                self._open.warn("read", error)
        self._settle(loading, identity, is_read)

    def _settle(self, loading: Loading, identity: bytes, is_read: bool) -> None:
        batch, place, view, slot = loading.batch, loading.place, loading.into, loading.slot
        header = self._proven(loading, identity) if is_read else None
        is_right = header is not None and header.is_of(identity, loading.key, view.nbytes)
        if is_right:
            source = self._memory.address(slot) + HEADER_BYTES
            batch.move(place, lambda: _copy(address_of(view), source, view.nbytes))
        is_same = False
        with self._open.changing(None):
            memory, files = self._memory.table, self._files.table
            space = memory.space(identity)
            if header is None or not memory.publish(slot, header.index, header.before, space):
                memory.free(slot)
            is_same = files.generation(loading.there) == loading.generation
            if header is None and is_same:
                files.free(loading.there)
        if is_right:
            self._verdict(batch, place, PageVerdict.HIT)
        else:
            self._verdict(
                batch, place, PageVerdict.BAD if header is None and is_same else PageVerdict.MISS
            )

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
        batch: PageBatch,
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
            self._verdict(batch, page.place, PageVerdict.DROPPED)

    def _take(self, batch: PageBatch, waiting: deque[Taking]) -> list[Taking]:
        """The next pages that need a slot, each with one, as far as there are slots."""
        memory, files, taken = self._memory.table, self._files.table, list[Taking]()
        with self._open.changing(batch.until - time.monotonic()):
            while waiting:
                page = waiting[0]
                if memory.find(page.index) >= 0 or files.find(page.index) >= 0:
                    self._verdict(batch, page.place, PageVerdict.HIT)
                elif (slot := memory.take(self._open.seat)) >= 0:
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
        with self._open.changing(None):
            space = memory.space(identity)
            for page in taken:
                slot = page.slot
                if slot in filled and memory.publish(slot, page.index, page.before, space):
                    memory.hold(slot, self._open.seat)
                    stored.append(slot)
                else:
                    memory.free(slot)
        self._write.submit(lambda: self._store(stored))
        for page in taken:
            self._verdict(page.batch, page.place, PageVerdict.STORED)

    def _fill(self, page: Taking, identity: bytes) -> bool:
        """Copy a page to its slot, unless it is late."""
        at, nbytes = self._memory.address(page.slot) + HEADER_BYTES, page.view.nbytes

        def copy() -> None:
            if page.view.readonly:
                self._memory.payload(page.slot, nbytes)[:] = page.view
            else:
                _copy(at, address_of(page.view), nbytes)

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
        with self._open.changing(None):
            for slot in slots:
                there = files.take(self._open.seat, self._files.below)
                if there >= 0:
                    jobs[slot] = there, self._begin_write(slot, there, headers[slot])
        done = {slot for slot, (_, job) in jobs.items() if self._is_written(job)}
        with self._open.changing(None):
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
            return self._open.job(slot, there, header.nbytes, is_write=True)
        except StorageError as error:
            self._open.warn("write", error)
            return None

    def _is_written(self, job: RangesJob | None) -> bool:
        if job is None:
            return False
        try:
            return job.wait(None)
        except StorageError as error:
            self._open.warn("write", error)
            return False

    def _flush_later(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile, and flushed
            self._write.submit(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_due = False
        try:
            self._open.flush()
        except StorageError as error:
            self._open.warn("flush", error)

    # -- small things ----------------------------------------------------------------------

    def _batch(self, count: int, deadline_s: float | None) -> PageBatch:
        if self._is_closed:
            raise ClosedError("the store of pages is closed", facts={"path": self.path})
        return PageBatch(
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

    def _submit(self, worker: Worker, batch: PageBatch, action: Callable[[], None]) -> None:
        """Queue the work of a call. What stops it is logged, and its pages are a miss."""

        def guarded() -> None:
            try:
                action()
            except WaitTimeout:
                pass  # another process holds the tables; the pages are late
            except Exception:
                logger.exception("the store of pages %s has failed", self.path)
                for place in range(batch.count):
                    batch.settle(place, PageVerdict.MISS)

        worker.submit(guarded)

    def _verdict(self, batch: PageBatch, place: int, verdict: PageVerdict) -> None:
        if batch.settle(place, verdict):
            self._counts[_COUNTED[verdict]] += 1
        else:
            self._counts["late"] += 1


_COUNTED = {
    PageVerdict.HIT: "hits",
    PageVerdict.MISS: "misses",
    PageVerdict.LATE: "late",
    PageVerdict.BAD: "bad",
    PageVerdict.STORED: "stored",
    PageVerdict.DROPPED: "dropped",
}


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
