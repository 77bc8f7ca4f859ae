"""PageStore: pages of a KV cache, in memory that a host shares and in files below it.

    put   caller's memory -> slot in memory (from now on all processes find it) -> slot in a file
    get   slot in memory -> caller's memory; before that, slot in a file -> slot in memory, verified

Three threads: one takes pages in, one writes them, one reads. A call only queues its work, and its
batch ends in time, whatever the storage does. contains() asks the tables alone.

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
import math
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
from statehold.kv.opened import Move, OpenStore, address_of
from statehold.kv.page import (
    HEADER_BYTES,
    IDENTITY_BYTES,
    Header,
    check_key,
    index_of,
    whole_blocks,
)
from statehold.kv.table import SlotTable
from statehold.observe.counters import figures_of
from statehold.process.worker import Worker
from statehold.units import MiB, check_timeout, parse_bytes

if TYPE_CHECKING:
    from statehold._core import RangesJob

logger = logging.getLogger("statehold")

# Pages that move as one: so many, or so many bytes. As many such groups are read at a time.
GROUP_PAGES = 64
GROUP_BYTES = 8 * MiB
GROUPS = 3
DEADLINE_S = 1.0
# How long close() waits for a storage that hangs.
CLOSE_S = 10.0
# Pages older than this survive a loss of power.
FLUSH_S = 1.0


# Stores that were closed while their storage hung: their memory stays.
hanging: list[PageStore] = []


@dataclass(slots=True)
class Loading:
    """A page that was asked for. slot: in memory, FILLING. there, generation: in a file."""

    batch: PageBatch
    place: int
    key: bytes
    into: memoryview
    index: int
    slot: int = -1
    there: int = -1
    generation: int = 0


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Pages that are read as one. job: None if the storage refuses."""

    batch: PageBatch
    loads: list[Loading]
    job: RangesJob | None


@dataclass(slots=True)
class Taking:
    """A page on its way into a slot in memory. before: index of the page before it."""

    batch: PageBatch
    place: int
    key: bytes
    view: memoryview
    index: int
    before: int
    score: float
    slot: int = -1
    serial: int = 0


class PageStore:
    """Pages of equal size in the directory `path`, which is made if need be.

    Args:
        path: a directory of this user, on a disk of this host.
        page_bytes: the size of the largest page. All processes that open the store give the same.
        capacity: the files together never take more bytes.
        memory: the memory for pages, which all processes of the host share; the first one decides.
        identity: what the pages depend on, 16 bytes (see statehold.kv.identity). Pages of another
            identity are not found, and go first.
        deadline_s: how long a call waits for its pages unless it says otherwise.

    Raises:
        UsageError: an argument makes no sense; the error says which.
        RunBusyError: another host uses the store, or too many processes do.
        FormatVersionError: another version of statehold has made the store.
        WaitTimeout: another process holds the tables of the store, and does nothing.
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
        self.page_bytes = _check_page_bytes(page_bytes)
        self._group_pages = max(1, min(GROUP_PAGES, GROUP_BYTES // self.page_bytes))
        self._deadline_s = check_timeout(deadline_s)
        self._identity = _check_identity(identity)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._is_flush_due = self._is_closed = False
        self._leftover: deque[LoadGroup] = deque()
        self._open = OpenStore(
            os.path.abspath(os.fspath(path)),
            page_bytes=self.page_bytes,
            capacity=parse_bytes(capacity),
            memory=parse_bytes(memory),
        )
        self._memory, self._files = self._open.memory, self._open.files
        self._open.use(self._identity)
        self._figures = figures_of(self._open.path, None)
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
        self._check_open()
        identity, memory, files = self._identity, self._memory.table.find, self._files.table.find
        indices = [index_of(identity, check_key(key)) for key in keys]
        return [memory(index) >= 0 or files(index) >= 0 for index in indices]

    def get(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview | bytearray],
        *,
        deadline_s: float | None = None,
    ) -> PageBatch:
        """Begin to read pages, each `into` memory of its size.

        Verdicts: HIT, MISS, LATE, BAD. After HIT the memory has the page, and otherwise anything.
        Keys are in the order of the prefix: each follows the one before.
        """
        views = [_bytes_of(each, is_written=True) for each in into]
        batch = self._begin(keys, views, deadline_s)
        loads = [
            Loading(batch, place, key, view, index_of(batch.identity, key))
            for place, (key, view) in enumerate(zip(keys, views, strict=True))
        ]
        self._submit(self._read, batch, lambda: self._load(batch, loads))
        return batch

    def put(
        self,
        keys: Sequence[bytes],
        pages: Sequence[memoryview | bytes],
        *,
        after: bytes | None = None,
        scores: Sequence[float] | None = None,
        deadline_s: float | None = None,
    ) -> PageBatch:
        """Begin to store pages. The caller leaves their memory unchanged until the verdicts.

        Verdicts: STORED, THERE, DROPPED, LATE. Keys are in the order of the prefix; `after` is the
        key before the first one. Of pages that were not used for long, those of lower `scores` go
        first; without scores they have 0.
        """
        views = [_bytes_of(each, is_written=False) for each in pages]
        worth = _check_scores([0.0] * len(keys) if scores is None else scores, len(keys))
        batch = self._begin(keys, views, deadline_s)
        indices = [index_of(batch.identity, key) for key in keys]
        first = 0 if after is None else index_of(batch.identity, check_key(after))
        waiting = deque(
            Taking(batch, place, key, view, index, before, score)
            for place, (key, view, index, before, score) in enumerate(
                zip(
                    keys, views, indices, [first, *indices[:-1]][: len(indices)], worth, strict=True
                )
            )
        )
        self._submit(self._take_in, batch, lambda: self._accept(batch, waiting))
        return batch

    def flush(self, timeout_s: float | None = None) -> None:
        """Return once all pages that were put are in files, or were dropped, and are durable.

        Raises StorageError if they cannot be made durable, and WaitTimeout after `timeout_s`.
        """
        self._check_open()
        timeout_s = check_timeout(timeout_s)
        until, errors = None, list[StorageError]()
        if timeout_s is not None:
            until = time.monotonic() + timeout_s

        def flush() -> None:
            try:
                self._open.flush()
            except StorageError as error:
                errors.append(error)

        is_taken = self._take_in.passed(until)
        self._write.submit(flush)
        if not (is_taken and self._write.passed(until)):
            facts = {"path": self.path, "still safe": "all pages: they are in memory"}
            raise WaitTimeout("pages are not in files yet", facts=facts)
        for error in errors:
            raise error

    @property
    def identity(self) -> bytes:
        """What the pages depend on."""
        return self._identity

    @identity.setter
    def identity(self, identity: bytes) -> None:
        self._check_open()
        # First: from now on no page of the old one is a HIT, not even of a call under way.
        self._identity = _check_identity(identity)
        self._open.use(identity)

    def stats(self) -> Mapping[str, int]:
        """The verdicts of this process, by name; unwritten: pages that are in memory alone, because
        the storage refused them. evicted: pages that went from the files, of all processes. pages,
        memory_pages: how many there are. pages_max: those that the files have room for."""
        self._check_open()
        names = [verdict.value for verdict in PageVerdict]
        counts = {name: self._counts[name] for name in [*names, "unwritten"]}
        return {
            **counts,
            "evicted": self._files.table.evicted,
            "pages": self._files.table.pages(),
            "pages_max": self._files.table.slots,
            "memory_pages": self._memory.table.pages(),
        }

    def close(self) -> None:
        """Write what was put, and let the store go. Idempotent.

        If the storage hangs, it returns after CLOSE_S and logs a warning. The memory and the files
        stay open then, because transfers may still use them.
        """
        if self._is_closed:
            return
        self._is_closed = True
        workers, until = (self._take_in, self._write, self._read), time.monotonic() + CLOSE_S
        has_ended = all(worker.passed(until) for worker in workers)
        jobs = [group.job for group in self._leftover if group.job is not None]
        for job in jobs:
            job.cancel()
        if has_ended and all(self._is_done(job, CLOSE_S) is not None for job in jobs):
            for worker in workers:
                worker.close()
            self._open.close([each.slot for group in self._leftover for each in group.loads])
            return
        for worker in workers:
            worker.leave()
        hanging.append(self)
        logger.warning(
            "the storage of the store of pages %s hangs, so close() does not wait for it. Pages "
            "that are not in files yet are lost, and are computed again", self.path,
        )  # fmt: skip

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading ---------------------------------------------------------------------------

    def _load(self, batch: PageBatch, loads: list[Loading]) -> None:
        self._reap()
        waiting, under_way = deque(self._absent(batch, loads)), deque[LoadGroup]()
        while waiting or under_way:
            self._start(batch, waiting, under_way)
            if not under_way:
                break
            self._finish(under_way.popleft())
        for loading in waiting:  # loads that are late have all the memory
            batch.settle(loading.place, PageVerdict.LATE)

    def _absent(self, batch: PageBatch, loads: list[Loading]) -> list[Loading]:
        """Deliver what is in memory; returns the others."""
        memory, files = self._memory.table, self._files.table
        found = {each.place: memory.find(each.index) for each in loads}
        absent = [
            each
            for each in loads
            if found[each.place] < 0 or not self._deliver(each, found[each.place])
        ]
        for each in absent:
            del found[each.place]
        used = [each.index for each in reversed(loads) if each.place in found]
        with self._open.changing(batch.seconds_left):
            memory.touch(map(memory.find, used))
            files.touch(map(files.find, used))
        return absent

    def _deliver(self, loading: Loading, slot: int) -> bool:
        """Copy a page from a slot in memory, which may be given to another one meanwhile."""
        table, batch = self._memory.table, loading.batch
        generation = table.generation(slot)
        header = Header.decode(self._memory.header(slot))
        if header is None or not header.is_of(batch.identity, loading.key, loading.into.nbytes):
            return False
        if not self._copy_out(loading, slot):
            return True  # it is late, and has its verdict
        if table.generation(slot) != generation or table.index(slot) != loading.index:
            return False
        self._hit(loading)
        return True

    def _copy_out(self, loading: Loading, slot: int) -> bool:
        """Copy a page to the caller's memory, unless it is late."""
        to, source = loading.into, self._memory.address(slot) + HEADER_BYTES
        copy = partial(ctypes.memmove, address_of(to), source, to.nbytes)
        return loading.batch.move(loading.place, copy)

    def _hit(self, loading: Loading) -> None:
        """The caller has the page; a miss if the identity has changed since the call."""
        is_current = loading.batch.identity == self._identity
        verdict = PageVerdict.HIT if is_current else PageVerdict.MISS
        loading.batch.settle(loading.place, verdict)

    def _start(
        self, batch: PageBatch, waiting: deque[Loading], under_way: deque[LoadGroup]
    ) -> None:
        """Begin to read pages, as far as memory has slots for them."""
        while waiting and len(under_way) < GROUPS:
            loads = self._next(batch, waiting)
            if loads:
                under_way.append(self._group(batch, loads))
            elif waiting:
                return

    def _next(self, batch: PageBatch, waiting: deque[Loading]) -> list[Loading]:
        """The next pages that are in files, each with a slot in memory."""
        memory, files, loads = self._memory.table, self._files.table, list[Loading]()
        with self._open.changing(batch.seconds_left):
            while waiting and len(loads) < self._group_pages:
                loading = waiting[0]
                loading.there = files.find(loading.index)
                if loading.there < 0:
                    batch.settle(loading.place, PageVerdict.MISS)
                elif (slot := memory.take(self._open.seat)) >= 0:
                    loading.slot, loading.generation = slot, files.generation(loading.there)
                    loads.append(loading)
                else:
                    break
                waiting.popleft()
            files.touch(loading.there for loading in reversed(loads))
        return loads

    def _group(self, batch: PageBatch, loads: list[Loading]) -> LoadGroup:
        moves = [(each.slot, each.there, each.into.nbytes) for each in loads]
        return LoadGroup(batch, loads, self._begin_job(moves))

    def _finish(self, group: LoadGroup) -> None:
        """Wait for pages from files, and deliver them; if late, later calls let them go."""
        is_read = self._is_done(group.job, group.batch.seconds_left)
        if is_read is None:
            self._leftover.append(group)
        elif is_read or len(group.loads) == 1:
            self._settle(group, is_read=is_read)
        else:  # one of them cannot be read
            for loading in group.loads:
                self._finish(self._group(group.batch, [loading]))

    def _reap(self) -> None:
        """Let go of loads that were late and are done by now."""
        for _ in range(len(self._leftover)):
            self._finish(self._leftover.popleft())

    def _settle(self, group: LoadGroup, *, is_read: bool) -> None:
        """Pages were read from files into their slots in memory, or could not be read."""
        memory, files = self._memory.table, self._files.table
        sums = memoryview(group.job.checksums() if is_read and group.job else b"").cast("Q")
        headers = [
            Header.decode(self._memory.header(each.slot)) if is_read else None
            for each in group.loads
        ]
        verdicts = [
            self._judged(loading, header, sums[2 * i + 1] if is_read else 0)
            for i, (loading, header) in enumerate(zip(group.loads, headers, strict=True))
        ]
        hits = [
            loading
            for loading, verdict in zip(group.loads, verdicts, strict=True)
            if verdict is PageVerdict.HIT and self._copy_out(loading, loading.slot)
        ]
        with self._open.changing(None):
            for i, (loading, header) in enumerate(zip(group.loads, headers, strict=True)):
                if (
                    verdicts[i] is not PageVerdict.HIT
                    or header is None
                    or not _publish(memory, loading.slot, header)
                ):
                    memory.free(loading.slot)
                if verdicts[i] is PageVerdict.BAD:
                    if files.generation(loading.there) == loading.generation:
                        files.free(loading.there)
                    else:  # the slot was given to another page while it was read
                        verdicts[i] = PageVerdict.MISS
        for loading in hits:
            self._hit(loading)
        for loading, verdict in zip(group.loads, verdicts, strict=True):
            loading.batch.settle(loading.place, verdict)

    def _judged(self, loading: Loading, header: Header | None, checksum: int) -> PageVerdict:
        """What was read, with this header: the page (HIT), another one (MISS), or damage (BAD)."""
        if header is None or header.index != loading.index:
            return PageVerdict.BAD
        if not header.is_of(loading.batch.identity, loading.key, loading.into.nbytes):
            return PageVerdict.MISS  # it has another size, or its key has the index of this one
        return PageVerdict.HIT if checksum == header.checksum else PageVerdict.BAD

    # -- writing ---------------------------------------------------------------------------

    def _accept(self, batch: PageBatch, waiting: deque[Taking]) -> None:
        while waiting:
            taken = self._take(batch, waiting)
            if waiting and not taken:  # memory is full of pages that are to be written
                if not self._write.passed(batch.until):
                    return  # they are late
                taken = self._take(batch, waiting)
                if waiting and not taken:
                    break
            self._publish(batch.identity, taken)
        for page in waiting:  # other processes have all the memory
            batch.settle(page.place, PageVerdict.DROPPED)

    def _take(self, batch: PageBatch, waiting: deque[Taking]) -> list[Taking]:
        """The next pages that need a slot, each with one, as far as there are slots."""
        memory, files, taken = self._memory.table, self._files.table, list[Taking]()
        there = list[int]()
        with self._open.changing(batch.seconds_left):
            while waiting:
                page = waiting[0]
                if memory.find(page.index) >= 0 or files.find(page.index) >= 0:
                    there.append(page.index)
                    batch.settle(page.place, PageVerdict.THERE)
                elif (slot := memory.take(self._open.seat)) >= 0:
                    page.slot, page.serial = slot, files.next_serial()
                    taken.append(page)
                else:
                    break
                waiting.popleft()
            for table in (memory, files):
                table.touch(map(table.find, reversed(there)))
        return taken

    def _publish(self, identity: bytes, taken: list[Taking]) -> None:
        """Fill slots in memory, let everybody find them, and have them written."""
        filled = {page.slot for page in taken if self._fill(page, identity)}
        stored, memory = list[int](), self._memory.table
        with self._open.changing(None):
            space = memory.space(identity)
            for page in taken:
                slot = page.slot
                if slot in filled and memory.publish(
                    slot, page.index, page.before, space, page.score
                ):
                    memory.hold(slot, self._open.seat)
                    stored.append(slot)
                else:
                    memory.free(slot)
        self._write.submit(lambda: self._store(stored))
        for page in taken:
            page.batch.settle(page.place, PageVerdict.STORED)

    def _fill(self, page: Taking, identity: bytes) -> bool:
        """Copy a page to its slot, unless it is late."""
        at, nbytes = self._memory.address(page.slot) + HEADER_BYTES, page.view.nbytes

        def copy() -> None:
            if page.view.readonly:
                self._memory.payload(page.slot, nbytes)[:] = page.view
            else:
                ctypes.memmove(at, address_of(page.view), nbytes)

        if not page.batch.move(page.place, copy):
            return False
        ctypes.memset(at + nbytes, 0, whole_blocks(nbytes) - nbytes)
        checksum = _core.hash_memory(at, whole_blocks(nbytes))
        header = Header(identity, page.key, nbytes, checksum, page.serial, page.before, page.score)
        self._memory.write_header(page.slot, header.encode())
        return True

    def _store(self, slots: list[int]) -> None:
        for first in range(0, len(slots), self._group_pages):
            self._store_some(slots[first : first + self._group_pages])
        if not self._is_flush_due:
            self._is_flush_due = True
            timer = threading.Timer(FLUSH_S, self._flush_later)
            timer.daemon = True
            timer.start()

    def _store_some(self, slots: list[int]) -> None:
        """Write pages from memory to files. What cannot be written stays in memory."""
        memory, files = self._memory.table, self._files.table
        headers = {slot: Header.decode(self._memory.header(slot)) for slot in slots}
        moves = list[Move]()
        with self._open.changing(None):
            for slot, header in headers.items():
                there = files.take(self._open.seat, self._files.below)
                if there >= 0 and header is not None:
                    moves.append((slot, there, header.nbytes))
        done = self._written(moves)
        with self._open.changing(None):
            for slot, there, _ in moves:
                header = headers[slot]
                if slot not in done or header is None or not _publish(files, there, header):
                    files.free(there)
            for slot in slots:
                memory.release(slot)
            # What was put last follows the others, so they were used after it.
            memory.touch(reversed(slots))
            written = [header.index for header in headers.values() if header is not None]
            files.touch(map(files.find, reversed(written)))
            files.cut(self._files.below)
        self._counts["unwritten"] += len(slots) - len(done)
        self._figures.add("pages_unwritten_total", len(slots) - len(done))
        self._figures.set("pages_evicted", files.evicted)
        self._figures.set("pages_in_files", files.pages())
        self._figures.set("pages_in_memory", memory.pages())

    def _written(self, moves: list[Move]) -> set[int]:
        """Write pages as one; the slots in memory of those that were written."""
        if moves and self._is_done(self._begin_job(moves, is_write=True), None):
            return {slot for slot, _, _ in moves}
        return set().union(*(self._written([each]) for each in moves)) if len(moves) > 1 else set()

    def _flush_later(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile, and flushed
            self._write.submit(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_due = False
        try:
            self._open.flush()
        except StorageError as error:
            self._open.warn("flush", error)

    # -- transfers -------------------------------------------------------------------------

    def _begin_job(self, moves: list[Move], *, is_write: bool = False) -> RangesJob | None:
        """None if the storage refuses, which is logged."""
        try:
            return self._open.job(moves, is_write=is_write)
        except StateholdError as error:
            self._open.warn("write" if is_write else "read", error)
            return None

    def _is_done(self, job: RangesJob | None, timeout_s: float | None) -> bool | None:
        """Whether pages were moved; None if that takes longer."""
        try:
            return job is not None and (job.wait(timeout_s) or None)
        except StateholdError as error:
            self._open.warn("move", error)
            return False

    # -- small things ----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the store of pages is closed", facts={"path": self.path})

    def _begin(
        self, keys: Sequence[bytes], views: Sequence[memoryview], deadline_s: float | None
    ) -> PageBatch:
        """The batch of a call, whose arguments are checked."""
        self._check_open()
        if len(keys) != len(views):
            facts = {"expected": f"{len(keys)} buffers", "got": len(views)}
            raise UsageError("as many buffers as keys are needed", facts=facts)
        for key, view in zip(keys, views, strict=True):
            check_key(key)
            if not 0 < view.nbytes <= self.page_bytes:
                facts = {"expected": f"1 to {self.page_bytes} bytes", "got": view.nbytes}
                raise UsageError("a page does not fit the store", facts=facts)
        timeout_s = self._deadline_s if deadline_s is None else check_timeout(deadline_s)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return PageBatch(len(keys), until, self._identity, self._count)

    def _count(self, verdict: PageVerdict) -> None:
        with self._counting:
            self._counts[verdict.value] += 1
        self._figures.add(f"pages_{verdict.value}_total")

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


def _bytes_of(memory: memoryview | bytes | bytearray, *, is_written: bool) -> memoryview:
    view = memoryview(memory)
    if not view.c_contiguous or (is_written and view.readonly):
        must = "that may be written " if is_written else ""
        raise UsageError(
            "a page has memory of another kind",
            facts={"expected": f"contiguous memory {must}".strip(), "got": shown(memory)},
        )
    return view.cast("B")


def _publish(table: SlotTable, slot: int, header: Header) -> bool:
    space = table.space(header.identity)
    return table.publish(slot, header.index, header.before, space, header.score)


def _check_scores(scores: Sequence[float], count: int) -> Sequence[float]:
    if len(scores) == count and all(map(math.isfinite, scores)):
        return scores
    facts = {"expected": f"{count} finite numbers", "got": shown(scores)}
    raise UsageError("a score for each page is needed", facts=facts)


def _check_page_bytes(value: int | str) -> int:
    nbytes = parse_bytes(value)
    if not nbytes:
        raise UsageError("a page needs bytes", facts={"expected": "at least 1", "got": nbytes})
    return nbytes


def _check_identity(identity: object) -> bytes:
    if isinstance(identity, bytes) and len(identity) == IDENTITY_BYTES:
        return identity
    raise UsageError(
        "not an identity",
        facts={"expected": f"{IDENTITY_BYTES} bytes", "got": shown(identity)},
        hint="statehold.kv.identity() makes one",
    )
