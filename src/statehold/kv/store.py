"""PageStore: pages of a KV cache, in memory that a host shares and in files below it.

    put   caller's memory -> slot in memory (from now on all processes find it) -> slot in a file
    get   slot in memory -> caller's memory; before that, slot in a file -> slot in memory, verified

Three threads: one takes pages in, one writes them, one reads. A call only queues its work, and its
batch ends in time, whatever the storage does. The threads that write and read begin the next call
while groups of pages of the one before are under way. contains() asks the tables alone.

Invariants: a page is right, or it is a miss. What comes from a file is taken only if its header has
the asked key under this identity, and its payload the header's checksum. What comes from memory is
taken only if its slot was not given to another page meanwhile. A page is found only after its bytes
are there. A slot that a process fills, writes or reads into is not given away, and what a dead
process was filling is free again. If the storage refuses, the store goes on in memory, and warns
once.
Not here: bytes of a page (page), which page goes first (native/page_table.h), the tables' lock
(opened).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

from statehold import _core
from statehold._core import PageTable, RangesJob
from statehold.errors import ClosedError, StateholdError, StorageError, WaitTimeout, refused
from statehold.kv.batch import BEHIND, COUNTED, VERDICTS, MovingPage, PageBatch, PageVerdict
from statehold.kv.behind import Behind, client_of
from statehold.kv.opened import Move, OpenStore, address_of
from statehold.kv.page import HEADER_BYTES, IDENTITY_BYTES, Header, indices_of
from statehold.observe.counters import figures_of
from statehold.process.warn import logger
from statehold.process.worker import Task, Worker
from statehold.units import MiB, check_timeout, parse_bytes

# Pages that move as one: so many, or so many bytes. As many such groups are read at a time, and
# as many written.
GROUP_PAGES = 64
GROUP_BYTES = 4 * MiB
GROUPS = 6
DEADLINE_S = 1.0
# The part of the slots in files that a process leaves alone once the storage has refused them. When
# it has ended, the next process that opens the store tries them again.
REFUSED_PART = 8
# How long close() waits for a storage that hangs.
CLOSE_S = 10.0
# Pages older than this survive a loss of power.
FLUSH_S = 1.0


# Stores that were closed while their storage hung: their memory stays.
hanging: list[PageStore] = []


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Pages that are read as one. job: None if the storage refuses."""

    batch: PageBatch
    pages: list[MovingPage]
    job: RangesJob | None


@dataclass(frozen=True, slots=True)
class StoreGroup:
    """Pages that are written as one. used: all that a call has put, behind its last group.
    headers: by slot in memory. below: the slots that had storage when it began. job: None if there
    is no room, or the storage refuses."""

    used: list[int]
    headers: dict[int, Header | None]
    moves: list[Move]
    below: int
    job: RangesJob | None


class UnderWay(deque[Any]):
    """Groups of pages that a thread moves, and leaves under way while it begins the next call: a
    storage that has nothing to do between two calls is slower by a third. finish: never raises."""

    def __init__(self, worker: Worker, finish: Callable[[Any], None]) -> None:
        super().__init__()
        self._worker, self._finish, self._has_turn = worker, finish, False

    def finish_oldest(self) -> None:
        """Wait for one of them, if there are any."""
        if self:
            self._finish(self[0])
            self.popleft()  # not before: who counts the groups waits for their memory

    def finish_all(self) -> None:
        """Wait for all of them."""
        while self:
            self.finish_oldest()

    def finish_later(self) -> None:
        """Wait for one after the other, in turns with the calls that have come."""
        if self and not self._has_turn:
            self._has_turn = True
            with contextlib.suppress(RuntimeError):  # it is being closed
                self._worker.submit(self._take_turn)

    def _take_turn(self) -> None:
        self._has_turn = False
        self.finish_oldest()
        self.finish_later()


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
        behind: the URL of an object store, such as s3://bucket/prefix, that gets all pages, and
            is asked for those that are not here. Nothing is deleted there.
        behind_options: its options, as for an ObjectStore; not for secrets.

    Raises:
        UsageError: an argument makes no sense; the error says which.
        RunBusyError: another host uses the store, or too many processes or identities do.
        FormatVersionError: another version of statehold has made the store.
        WaitTimeout: another process holds the tables of the store, and does nothing.
        StorageError: the directory cannot be used.

    Thread-safe.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, page_bytes: int | str, capacity: int | str = "16GiB",
        memory: int | str = "1GiB", identity: bytes = bytes(IDENTITY_BYTES),
        deadline_s: float = DEADLINE_S, behind: str | None = None,
        behind_options: Mapping[str, Any] = {},
    ) -> None:  # fmt: skip
        self.page_bytes = parse_bytes(page_bytes)
        if not self.page_bytes:
            raise refused("a page needs bytes", "at least 1", page_bytes)
        self._group_pages = max(1, min(GROUP_PAGES, GROUP_BYTES // self.page_bytes))
        self._deadline_s = check_timeout(deadline_s)
        client = None if behind is None else client_of(behind, behind_options)
        self._identity = _check_identity(identity)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.conversing = threading.Lock()  # a conversation is saved or resumed (caches)
        self._is_flush_due, self._refused = False, 0
        # Of the process that has it open: a forked child has no threads of it. 0: it is closed.
        self._pid = os.getpid()
        self._leftover = deque[LoadGroup]()
        self.path = os.path.abspath(os.fspath(path))
        self._open = OpenStore(
            self.path, page_bytes=self.page_bytes, identity=self._identity,
            capacity=parse_bytes(capacity), memory=parse_bytes(memory),
        )  # fmt: skip
        self._memory, self._files = self._open.memory, self._open.files
        self._counted: PageTable | None = self._files.table  # until it is closed
        self._figures = figures_of(self.path, None)
        self._read, self._write, self._take_in = (
            Worker(f"statehold-kv-{name}") for name in ("read", "write", "take-in")
        )
        self._reading = UnderWay(self._read, lambda g: self._guarded(g.batch, self._finish, g))
        self._writing = UnderWay(self._write, partial(self._guarded, None, self._stored))
        self._behind: Behind | None = None
        if client is not None:
            self._behind = Behind(
                client, self._open, self._identity, count=self._add, deliver=self._came
            )
        for begin in range(0, len(unwritten := self._open.unwritten), self._group_pages):
            part = unwritten[begin : begin + self._group_pages]
            used = [self._memory.table.index(slot) for slot in reversed(part)]
            self._write.submit(partial(self._store, part, used))

    # -- calls -----------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are there, as far as the tables know. Waits for nothing."""
        self._check_open()
        indices = indices_of(self._identity, keys)
        here, there = (each.table.find_all(indices) for each in (self._memory, self._files))
        behind = self._behind.has(indices) if self._behind else [False] * len(indices)
        return [max(a, b) >= 0 or c for a, b, c in zip(here, there, behind, strict=True)]

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview | bytearray], *,
        deadline_s: float | None = None,
    ) -> PageBatch:  # fmt: skip
        """Begin to read pages, each `into` memory of its size.

        Verdicts: HIT, MISS, LATE, BAD. After HIT the memory has the page, and otherwise anything.
        Keys are in the order of the prefix: each follows the one before.
        """
        batch, pages = self._begin(keys, into, deadline_s, is_written=True)
        self._read.submit(partial(self._guarded, batch, self._load, batch, pages))
        return batch

    def put(
        self, keys: Sequence[bytes], pages: Sequence[memoryview | bytes], *,
        after: bytes | None = None, scores: Sequence[float] | None = None,
        deadline_s: float | None = None,
    ) -> PageBatch:  # fmt: skip
        """Begin to store pages. The caller leaves their memory unchanged until the verdicts.

        Verdicts: STORED, THERE, DROPPED, LATE. Keys are in the order of the prefix; `after` is the
        key before the first one. Of pages that were not used for long, those of lower `scores` go
        first; without scores they have 0.
        """
        batch, moving = self._begin(keys, pages, deadline_s, is_written=False)
        worth = [0.0] * len(keys) if scores is None else scores
        if len(worth) != len(keys) or not all(map(math.isfinite, worth)):
            expected = f"{len(keys)} finite numbers"
            raise refused("a score for each page is needed", expected, scores)
        before = 0 if after is None else indices_of(batch.identity, [after])[0]
        for page, score in zip(moving, worth, strict=True):
            page.before, page.score, before = before, score, page.index
        self._take_in.submit(partial(self._guarded, batch, self._accept, batch, deque(moving)))
        return batch

    def flush(self, timeout_s: float | None = None) -> None:
        """Return once all pages that were put are in files, and durable, or dropped, or unwritten.

        Raises StorageError if they cannot be made durable, and WaitTimeout after `timeout_s`.
        """
        self._check_open()
        until, flushed = _until(timeout_s), Task(self._open.flush)
        is_taken = self._take_in.passed(until)
        self._write.submit(self._writing.finish_all)
        self._write.submit(flushed.make)
        if not (is_taken and self._write.passed(until)):
            facts = {"path": self.path, "still safe": "all pages: they are in memory"}
            raise WaitTimeout("pages are not in files yet", facts=facts)
        if not flushed.has_ended:  # the thread has ended with the program
            self._writing.finish_all()
            flushed.make()
        flushed.result()

    @property
    def identity(self) -> bytes:
        """What the pages depend on."""
        return self._identity

    @identity.setter
    def identity(self, identity: bytes) -> None:
        self._check_open()
        # First: from now on no page of the old one is a HIT, not even of a call under way.
        self._identity = _check_identity(identity)
        if self._behind is not None:
            self._behind.use(identity)
        self._open.use(identity)  # which may raise an error

    def stats(self) -> Mapping[str, int]:
        """The verdicts of this process, by name; unwritten: pages that are in memory alone, because
        the storage refused them. evicted: pages that went from the files, of all processes. pages,
        memory_pages: how many there are. pages_max: those that the files have room for."""
        self._check_open()
        return {
            **{name: self._counts[name] for name in (*VERDICTS, *BEHIND, "unwritten")},
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
        if self._pid != os.getpid():
            return
        self._pid = 0
        workers, until = (self._take_in, self._write, self._read), time.monotonic() + CLOSE_S
        has_ended = self._take_in.passed(until)
        self._write.submit(self._writing.finish_all)
        self._read.submit(self._reading.finish_all)
        has_ended = all(worker.passed(until) for worker in workers) and has_ended
        if self._behind is not None:
            has_ended = self._behind.close(until) and has_ended
        if has_ended:
            for worker in workers:
                worker.close()
            # What was begun meanwhile, or left by threads that have ended with the program.
            self._writing.finish_all()
            self._reading.finish_all()
        jobs = [group.job for group in self._leftover if group.job is not None]
        for job in jobs:
            job.cancel()
        if has_ended and all(self._is_done(job, CLOSE_S) is not None for job in jobs):
            with self._counting:
                self._counted = None
            self._open.close([each.slot for group in self._leftover for each in group.pages])
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

    def _load(self, batch: PageBatch, pages: list[MovingPage]) -> None:
        self._reap()
        waiting, may_wait = deque(self._absent(batch, pages)), True
        if not waiting:  # or many such calls would keep one that came before them from its end
            self._reading.finish_oldest()
        try:
            while waiting:
                if len(self._reading) < GROUPS and (chosen := self._next(batch, waiting)):
                    self._reading.append(self._group(batch, chosen))
                elif waiting and self._reading:
                    self._reading.finish_oldest()
                elif waiting and may_wait:  # memory is full of pages that are to be written
                    self._write.submit(self._writing.finish_all)
                    self._write.passed(batch.until)
                    may_wait = False
                else:
                    break
        finally:
            self._reading.finish_later()
        # Loads that are late have all the memory.
        batch.settle([page.place for page in waiting], PageVerdict.LATE)

    def _reap(self) -> None:
        """Give back the memory of late loads, as far as they are done by now."""
        for _ in range(len(self._leftover)):
            self._finish(self._leftover.popleft())

    def _absent(self, batch: PageBatch, pages: list[MovingPage]) -> list[MovingPage]:
        """Deliver what is in memory; returns the others."""
        memory, files = self._memory.table, self._files.table
        absent, slots = list[MovingPage](), memory.find_all([page.index for page in pages])
        for page, slot in zip(pages, slots, strict=True):
            if slot < 0 or not self._deliver(page, slot):
                absent.append(page)
        with self._open.changing(batch.seconds_left):
            for table in (memory, files):
                table.touch(table.find_all([page.index for page in reversed(pages)]))
        return absent

    def _deliver(self, page: MovingPage, slot: int) -> bool:
        """Copy a page from a slot in memory, which may be given to another one meanwhile."""
        table, batch = self._memory.table, page.batch
        generation, header = table.generation(slot), self._header(slot)
        is_it = header is not None and header.is_of(batch.identity, page.key, page.view.nbytes)
        # The slot may have been given to another page between find_all() and this generation.
        if table.find(page.index) != slot or not is_it:
            return False
        if not self._copy_out(page, self._memory.address(slot) + HEADER_BYTES):
            return True  # it is late, and has its verdict
        if table.generation(slot) != generation:
            return False
        batch.settle([page.place], self._hit(batch))
        return True

    def _header(self, slot: int) -> Header | None:
        return Header.decode(self._memory.slot(slot))

    def _copy_out(self, page: MovingPage, source: int) -> bool:
        """Copy a page to the caller's memory, unless it is late."""
        copy = partial(ctypes.memmove, address_of(page.view), source, page.view.nbytes)
        return page.batch.move(page.place, copy)

    def _hit(self, batch: PageBatch) -> PageVerdict:
        """The caller has a page; a miss if the identity has changed since the call."""
        return PageVerdict.HIT if batch.identity == self._identity else PageVerdict.MISS

    def _next(self, batch: PageBatch, waiting: deque[MovingPage]) -> list[MovingPage]:
        """The next pages that are in files, each with a slot in memory."""
        memory, files, chosen = self._memory.table, self._files.table, list[MovingPage]()
        missing = list[MovingPage]()
        with self._open.changing(batch.seconds_left):
            while waiting and len(chosen) < self._group_pages:
                page = waiting[0]
                page.there = files.find(page.index)
                if page.there < 0:
                    missing.append(page)
                elif (slot := memory.take(self._open.seat)) >= 0:
                    page.slot, page.generation = slot, files.generation(page.there)
                    chosen.append(page)
                else:
                    break
                waiting.popleft()
        if self._behind is None:
            batch.settle([page.place for page in missing], PageVerdict.MISS)
        elif missing:
            self._behind.ask(batch, missing)
        return chosen

    def _group(self, batch: PageBatch, pages: list[MovingPage]) -> LoadGroup:
        moves = [(each.slot, each.there, each.view.nbytes) for each in pages]
        return LoadGroup(batch, pages, self._begin_job(moves, pages))

    def _finish(self, group: LoadGroup) -> None:
        """Wait for pages from files, and deliver them; if late, later calls let them go."""
        is_read = self._is_done(group.job, group.batch.seconds_left)
        if is_read is None:
            self._leftover.append(group)
        elif is_read or len(group.pages) == 1:
            self._settle(group, is_read=is_read)
        else:  # one of them cannot be read
            for page in group.pages:
                self._finish(self._group(group.batch, [page]))

    def _settle(self, group: LoadGroup, *, is_read: bool) -> None:
        """Pages were read from files into their slots in memory, or could not be read."""
        memory, files = self._memory.table, self._files.table
        if is_read and group.job is not None:
            sums = memoryview(group.job.checksums()).cast("Q")[1::2]
            for page, checksum in zip(group.pages, sums, strict=True):
                page.header = self._header(page.slot)
                page.verdict = _judged(page, checksum)
                if page.verdict is PageVerdict.HIT:
                    self._copy_out(page, self._memory.address(page.slot) + HEADER_BYTES)
        with self._open.changing(None):
            for page in group.pages:
                is_hit = page.verdict is PageVerdict.HIT
                if not is_hit or not _publish(memory, page.slot, page.header):
                    memory.free(page.slot)
                if page.verdict is PageVerdict.BAD:
                    if files.generation(page.there) == page.generation:
                        files.free(page.there)
                    else:  # the slot was given to another page while it was read
                        page.verdict = PageVerdict.MISS
        for verdict in {page.verdict for page in group.pages}:
            places = [page.place for page in group.pages if page.verdict is verdict]
            is_hit = verdict is PageVerdict.HIT
            group.batch.settle(places, self._hit(group.batch) if is_hit else verdict)
        self._files.note(p.there for p in group.pages if p.verdict is PageVerdict.BAD)

    def _came(self, batch: PageBatch, pages: list[MovingPage], raws: list[memoryview]) -> bool:
        """Deliver pages from behind, and keep them as if they were put. False if one is wrong."""
        kept = PageBatch(len(pages), _until(self._deadline_s), batch.identity, lambda _: None)
        right = deque[MovingPage]()
        for page, raw in zip(pages, raws, strict=True):
            header = Header.proven(raw)
            if header is not None and header.is_of(batch.identity, page.key, page.view.nbytes):
                payload = raw[HEADER_BYTES:][: header.nbytes]
                about = (page.key, payload, page.index, header.before, header.score)
                right.append(MovingPage(kept, len(right), *about))
                self._copy_out(page, address_of(payload))
                batch.settle([page.place], self._hit(batch))
        self._add({"behind_hit": len(right), "behind_bad": len(pages) - len(right)})
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile
            self._take_in.submit(partial(self._guarded, kept, self._accept, kept, right))
        if len(right) < len(pages):
            self._open.warn("use", "its bytes are wrong", "an object behind it")
        return len(right) == len(pages)

    # -- writing ---------------------------------------------------------------------------

    def _accept(self, batch: PageBatch, waiting: deque[MovingPage]) -> None:
        left = 1
        used = [index for page in reversed(waiting) for index in (page.index, page.before)]
        with self._open.changing(batch.seconds_left):
            # First, or what is there and what the first page follows could go for the new ones.
            for table in (self._memory.table, self._files.table):
                table.touch(table.find_all(used))
        try:
            while waiting:
                if taken := self._take(batch, waiting):
                    self._publish(batch, taken)
                    left = 1
                elif waiting and left:  # memory is full of pages that are read, or to be written
                    self._read.submit(self._reading.finish_oldest)
                    self._read.submit(self._reap)
                    self._write.submit(self._writing.finish_oldest)
                    if not (self._read.passed(batch.until) and self._write.passed(batch.until)):
                        return  # they are late
                    left = len(self._reading) + len(self._writing)
                else:
                    break
        finally:
            self._write.submit(partial(self._store, [], used))
        # Other processes have all the memory.
        batch.settle([page.place for page in waiting], PageVerdict.DROPPED)

    def _take(self, batch: PageBatch, waiting: deque[MovingPage]) -> list[MovingPage]:
        """The next pages that need a slot, each with one, as far as there are slots. At most a
        group: the storage begins with it while others are copied."""
        memory, files, taken = self._memory.table, self._files.table, list[MovingPage]()
        there = list[MovingPage]()
        with self._open.changing(batch.seconds_left):
            while waiting and len(taken) < self._group_pages:
                page = waiting[0]
                if memory.find(page.index) >= 0 or files.find(page.index) >= 0:
                    there.append(page)
                elif (slot := memory.take(self._open.seat)) >= 0:
                    page.slot = slot
                    taken.append(page)
                else:
                    break
                waiting.popleft()
        batch.settle([page.place for page in there], PageVerdict.THERE)
        return taken

    def _publish(self, batch: PageBatch, taken: list[MovingPage]) -> None:
        """Fill slots in memory, let everybody find them, and have them written."""
        for page in taken:
            fill = partial(_core.fill_page, self._memory.address(page.slot), page.view)
            about = (batch.identity, page.key, page.before, page.score)
            page.is_filled = batch.move(page.place, partial(fill, *about))
        stored, memory = list[int](), self._memory.table
        with self._open.changing(None):
            space = memory.space(batch.identity)
            for page in taken:
                which = (page.slot, page.index, page.before, space, page.score)
                if page.is_filled and memory.publish(*which):
                    memory.hold(page.slot, self._open.seat)
                    stored.append(page.slot)
                else:
                    memory.free(page.slot)
        self._write.submit(partial(self._store, stored, []))
        verdict = PageVerdict.DROPPED if space < 0 else PageVerdict.STORED
        batch.settle([page.place for page in taken if page.is_filled], verdict)

    def _store(self, slots: list[int], used: list[int]) -> None:
        """Write pages from memory to files as one. What cannot be written stays in memory."""
        if len(self._writing) == GROUPS:
            self._writing.finish_oldest()
        self._writing.append(self._begin_storing(slots, used))
        self._writing.finish_later()

    def _begin_storing(self, slots: list[int], used: list[int]) -> StoreGroup:
        """Begin to write pages as one, as far as there are slots in files."""
        headers, moves = {slot: self._header(slot) for slot in slots}, list[Move]()
        take, below = self._files.table.take, self._files.grow() if slots else self._files.below
        with self._open.changing(None):
            for slot, header in headers.items():
                if header is not None and (there := take(self._open.seat, below)) >= 0:
                    moves.append((slot, there, header.nbytes))
        self._files.note(there for _, there, _ in moves)  # that they hold nothing now
        job = self._begin_job(moves, is_write=True) if moves else None
        return StoreGroup(used, headers, moves, below, job)

    def _stored(self, group: StoreGroup) -> None:
        """Wait until pages are in files, and let everybody find them there."""
        memory, files = self._memory.table, self._files.table
        done = self._written(group.moves, group.job)
        with self._open.changing(None):
            for slot, there, _ in group.moves:
                is_refused = slot not in done and there < self._files.below
                if is_refused and self._refused < files.slots // REFUSED_PART:
                    self._refused += 1  # it stays taken, or each later page would be tried there
                elif slot not in done or not _publish(files, there, group.headers[slot]):
                    files.free(there)
            for slot in group.headers:
                memory.release(slot)
            if self._files.below < group.below:  # a write has found the disk full
                files.cut(self._files.below)
            # What was put last follows the others, so they were used after it. Once for a call:
            # using a page walks over those before it.
            for table in (memory, files):
                table.touch(table.find_all(group.used))
        self._files.note(there for _, there, _ in group.moves)
        if self._behind is not None:
            sent = [(there, memory.index(slot)) for slot, there, _ in group.moves if slot in done]
            self._behind.send(sent)
        self._counts["unwritten"] += len(group.headers) - len(done)
        self._figures.add("pages_unwritten_total", len(group.headers) - len(done))
        self._figures.set("pages_evicted", self._files.table.evicted)
        self._figures.set("pages_in_files", self._files.table.pages())
        self._figures.set("pages_in_memory", self._memory.table.pages())
        if not self._is_flush_due:
            self._is_flush_due = True
            timer = threading.Timer(FLUSH_S, self._flush_later)
            timer.daemon = True
            timer.start()

    def _written(self, moves: list[Move], job: RangesJob | None) -> set[int]:
        """The slots in memory of those pages that were written. If one was not, each is tried."""
        if self._is_done(job, None):
            return {slot for slot, _, _ in moves}
        alone = [[each] for each in moves if len(moves) > 1]
        found = (self._written(each, self._begin_job(each, is_write=True)) for each in alone)
        return set().union(*found)

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

    def _begin_job(
        self, moves: list[Move], read: Sequence[MovingPage] = (), *, is_write: bool = False
    ) -> RangesJob | None:
        """None if the storage refuses, which is logged. read: pages that may be right all the same,
        unless their segment is gone."""
        try:
            return self._open.job(moves, is_write=is_write)
        except StateholdError as error:
            self._open.warn("write" if is_write else "read", error)
            for page in read if isinstance(error, StorageError) else ():
                page.verdict = PageVerdict.MISS
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
        if self._pid != os.getpid():
            raise ClosedError("the store of pages is closed", facts={"path": self.path})

    def _begin(
        self, keys: Sequence[bytes], memory: Sequence[Any], deadline_s: float | None, *,
        is_written: bool,
    ) -> tuple[PageBatch, list[MovingPage]]:  # fmt: skip
        """The batch of a call, and its pages. Raises UsageError."""
        self._check_open()
        if len(keys) != len(memory):
            raise refused("as many buffers as keys are needed", len(keys), len(memory))
        until = _until(self._deadline_s if deadline_s is None else deadline_s)
        sizes, pages = list[int](), list[MovingPage]()
        batch = PageBatch(len(keys), until, self._identity, partial(self._count, sizes))
        indices = indices_of(batch.identity, keys)
        for place, (key, given, index) in enumerate(zip(keys, memory, indices, strict=True)):
            try:
                view = memoryview(given)
            except TypeError:
                raise refused("a page is no buffer", "such as tensor.numpy()", given) from None
            if not view.c_contiguous or (is_written and view.readonly):
                must = "contiguous memory" + " that may be written" * is_written
                raise refused("a page has memory of another kind", must, given)
            if not 0 < view.nbytes <= self.page_bytes:
                raise refused("a page does not fit", f"1 to {self.page_bytes} bytes", view.nbytes)
            pages.append(MovingPage(batch, place, key, view.cast("B"), index))
            sizes.append(view.nbytes)
        return batch, pages

    def _count(self, sizes: list[int], verdicts: list[PageVerdict | None]) -> None:
        """A call has ended: count it in this process, and once where all processes count."""
        counts = {each.value: verdicts.count(each) for each in PageVerdict}
        for kind in (PageVerdict.HIT, PageVerdict.STORED):
            are_moved = [each is kind for each in verdicts]
            counts[f"{kind.value}_bytes"] = sum(compress(sizes, are_moved))
        self._add(counts)

    def _add(self, counts: Mapping[str, int]) -> None:
        with self._counting:
            self._counts.update(counts)
            if self._counted is not None:
                self._counted.count(self._open.seat, [counts.get(name, 0) for name in COUNTED])
        for name, count in counts.items():
            self._figures.add(f"pages_{name}_total", count)

    def _guarded(self, batch: PageBatch | None, action: Callable[..., None], *args: Any) -> None:
        """Do a part of a call. What stops it is logged, and its pages are a miss."""
        try:
            with contextlib.suppress(WaitTimeout):  # others hold the tables; the pages are late
                action(*args)
        except Exception:
            logger.exception("the store of pages %s has failed", self.path)
            if batch is not None:
                batch.settle(range(batch.count), PageVerdict.MISS)


def _publish(table: PageTable, slot: int, header: Header | None) -> bool:
    if header is None:
        return False
    space = table.space(header.identity)
    return table.publish(slot, header.index, header.before, space, header.score)


def _judged(page: MovingPage, checksum: int) -> PageVerdict:
    """What was read, of this checksum: the page (HIT), another one (MISS), or damage (BAD)."""
    header = page.header
    if header is not None and header.is_of(page.batch.identity, page.key, page.view.nbytes):
        return PageVerdict.HIT if checksum == header.checksum else PageVerdict.BAD
    # It has another size, or its key has the index of this one.
    is_other = header is not None and header.index == page.index
    return PageVerdict.MISS if is_other else PageVerdict.BAD


def _until(timeout_s: float | None) -> float | None:
    """On the monotonic clock."""
    timeout_s = check_timeout(timeout_s)
    return None if timeout_s is None else time.monotonic() + timeout_s


def _check_identity(identity: object) -> bytes:
    if isinstance(identity, bytes) and len(identity) == IDENTITY_BYTES:
        return identity
    raise refused("not an identity", f"{IDENTITY_BYTES} bytes", identity, "kv.identity() makes one")
