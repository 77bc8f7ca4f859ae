"""An object store behind a store of pages, for other hosts, and for later ones.

    URL/IDENTITY/TIME.NBYTES.INDICES     pages of NBYTES, each behind its header, as in a slot

The name of an object says which pages it has. So one listing finds all of them, and a page that is
not there costs no request. It begins with the second in which the object was sent, so later
listings have only what is new. One thread lists, and sends what the files have. An object with
pages that somebody wants comes on a thread of its own.

Invariants: only close() waits for the object store, and no longer than it may. A page proves itself
as in a file; an object with a wrong one is used no more. A failure is counted, and the store is
left alone for AGAIN_S. A page of the files stays to be sent until it was. One process of a host
also sends what others have left. Nothing is deleted here.
Not here: reading files (opened), pages on their way (store), requests (io/objects).
"""

from __future__ import annotations

import base64
import contextlib
import queue
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from statehold.errors import MissingFileError, TruncatedFileError
from statehold.io.objects.client import ObjectClient, no_limit
from statehold.kv.batch import MovingPage, PageBatch, PageVerdict
from statehold.kv.opened import OpenStore
from statehold.kv.page import HEADER_BYTES, whole_blocks
from statehold.process.worker import Thread
from statehold.units import MiB

# An object has at most so many pages, or bytes: a file's name has room for the indices.
PACK_PAGES, PACK_BYTES = 16, 16 * MiB
KNOWN_MAX = 1 << 22  # pages
FETCHES = 16  # at a time
TURN_S, LOOK_S, AGAIN_S = 1.0, 60.0, 10.0  # between two sends, two listings, and after a failure
LOOK_PART = 20  # a listing waits so many times as long as the one before has taken
# A listing of all objects finds those of a host whose clock is more than SKEW_S behind, too.
ALL_S, SKEW_S = 3600.0, 600
ASK_S, SEND_S = 10.0, 30.0  # the longest requests

T = TypeVar("T")

_INDEX = struct.Struct("<Q")


def client_of(url: str, options: Mapping[str, Any]) -> ObjectClient:
    """For Behind. Raises UsageError for another URL, and for options that are not known."""
    return ObjectClient(url, options, deadline_s=SEND_S)


class Behind:
    """The objects of a client. store: has the pages that are sent. count: of what happens. deliver:
    takes pages that came, and their bytes; returns whether all were right."""

    def __init__(
        self, client: ObjectClient, store: OpenStore, identity: bytes, *,
        count: Callable[[Mapping[str, int]], None],
        deliver: Callable[[PageBatch, list[MovingPage], list[memoryview]], bool],
    ) -> None:  # fmt: skip
        self._client, self._asking = client, client.hasty(ASK_S, lambda: None)
        self._store, self._count, self._deliver = store, count, deliver
        self._pack_pages = max(1, min(PACK_PAGES, PACK_BYTES // store.files.slot_bytes))
        self._guard, self._reading = threading.Lock(), threading.Lock()
        self._fetches = threading.Semaphore(FETCHES)
        self._identity, self._seen = identity, set[str]()  # names of objects
        self._known = dict[int, str]()  # by index, the name of the object
        self._unsent = deque[int](maxlen=store.files.table.slots)
        # Calls that wait for the first listing; None after it.
        self._waiting: list[tuple[PageBatch, list[MovingPage]]] | None = []
        self._look_s = self._all_s = self._well_s = 0.0  # when it is asked again, for all names
        self._after: str | None = None  # the names behind this one may be new
        self._woken, self._is_closing, self._is_left = queue.SimpleQueue[None](), False, False
        self._thread = Thread(self._run, "statehold-kv-behind")
        self._thread.start()

    def has(self, indices: Iterable[int]) -> list[bool]:
        """Which pages are there, as far as is known."""
        return [index in self._known for index in indices]

    def use(self, identity: bytes) -> None:
        """The pages of another identity, from now on."""
        with self._guard:
            if identity != self._identity:
                self._identity, self._waiting = identity, self._waiting or []
                self._known, self._seen, self._after = {}, set(), None
        self._woken.put(None)

    def send(self, pages: Iterable[tuple[int, int]]) -> None:
        """Send pages in files, soon: of each its slot, and its index."""
        with self._guard:
            self._unsent.extend(slot for slot, index in pages if index not in self._known)

    def close(self, until: float) -> bool:
        """Send what is left, until then. Returns whether no file is read any more."""
        self._is_closing = True
        self._woken.put(None)
        if self._unsent and self._is_well:
            self._thread.join(max(0.0, until - time.monotonic()))
        self._client.stop()
        is_ended = self._reading.acquire(timeout=max(0.0, until - time.monotonic()))
        self._is_left = True
        if is_ended:
            self._reading.release()
        return is_ended

    @property
    def _is_well(self) -> bool:
        return time.monotonic() >= self._well_s

    # -- what somebody wants ---------------------------------------------------------------

    def ask(self, batch: PageBatch, pages: list[MovingPage]) -> None:
        """Begin to fetch pages. A page that is not there is a miss."""
        objects, absent = defaultdict[str, list[MovingPage]](list), list[int]()
        with self._guard:
            if self._waiting is not None:
                self._waiting.append((batch, pages))
                return
            known = self._known if self._is_well else {}
            for page in pages:
                name = known.get(page.index, "")
                is_there = f".{page.view.nbytes}." in name
                if is_there and (name in objects or self._fetches.acquire(blocking=False)):
                    objects[name].append(page)
                else:
                    absent.append(page.place)
        batch.settle(absent, PageVerdict.MISS)
        for name, wanted in objects.items():
            Thread(self._fetch, "statehold-kv-fetch", batch, name, wanted).start()

    def _fetch(self, batch: PageBatch, name: str, pages: list[MovingPage]) -> None:
        nbytes, indices = _pages_in(name)
        size, places = HEADER_BYTES + whole_blocks(nbytes), [indices.index(p.index) for p in pages]
        begin, end = min(places) * size, (1 + max(places)) * size
        memory, is_right = memoryview(bytearray(end - begin)), False
        try:
            self._asking.fetch(name, [(begin, memory)])
            raws = [memory[place * size - begin :][:size] for place in places]
            is_right = self._deliver(batch, pages, raws)
        except MissingFileError:
            pass  # somebody has deleted it
        except TruncatedFileError as error:
            self._count({"behind_bad": len(pages)})
            self._store.warn("use", error, "an object behind it")
        except Exception as error:
            is_right = True
            self._fail(error)
        finally:
            self._fetches.release()
            with self._guard:
                for index in () if is_right else indices:
                    self._known.pop(index, None)
            batch.settle([page.place for page in pages], PageVerdict.MISS)

    def _fail(self, error: Exception) -> None:
        self._well_s = time.monotonic() + AGAIN_S
        self._count({"behind_failed": 1})
        self._store.warn("reach", error, "the object store behind it")

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing
            try:
                if self._is_well and (self._waiting is not None or time.monotonic() > self._look_s):
                    self._look(self._identity)
                while self._is_well and self._unsent and not self._is_left:
                    self._send(self._identity)
            except Exception as error:
                self._fail(error)
            with contextlib.suppress(queue.Empty):
                self._woken.get(timeout=0.0 if is_last else TURN_S)

    def _look(self, identity: bytes) -> None:
        """See which pages are there, and which ones of the files are not."""
        begin, seen = time.monotonic(), self._seen
        later = _name(identity, time.time() - SKEW_S)
        after = self._after if begin < self._all_s else None
        try:
            with contextlib.suppress(MissingFileError):
                for name in self._asking.list_all(identity.hex(), after):
                    if name not in seen:
                        self._learn(identity, name)
            with self._guard:
                if seen is self._seen:  # of this identity, all the while
                    self._after = later
                    self._all_s = self._all_s if after else begin + ALL_S
            if after is None:  # a million slots take a second
                self.send(self._read(self._store.left_behind))
            now = time.monotonic()
            self._look_s = now + max(LOOK_S, LOOK_PART * (now - begin))
        finally:
            waiting = list[tuple[PageBatch, list[MovingPage]]]()
            with self._guard:
                if identity == self._identity:
                    waiting, self._waiting = self._waiting or [], None
            for batch, pages in waiting:
                self.ask(batch, pages)

    def _learn(self, identity: bytes, name: str) -> None:
        with self._guard, contextlib.suppress(ValueError, struct.error):  # some other object
            if identity == self._identity:
                self._seen.add(name)
                self._known.update(dict.fromkeys(_pages_in(name)[1], name))
                while len(self._known) > KNOWN_MAX:
                    del self._known[next(iter(self._known))]

    def _send(self, identity: bytes) -> None:
        """Send some pages, those of a size as one object."""
        with self._guard:
            slots = list(islice(self._unsent, self._pack_pages))
        groups = defaultdict[int, dict[int, memoryview]](dict)
        for header, raw in self._read(partial(self._store.pages_in, slots)):
            if header.identity == identity and header.index not in self._known:
                groups[header.nbytes][header.index] = raw
        for nbytes, pages in groups.items():
            name = f"{_name(identity, time.time())}.{nbytes}.{_packed(pages)}"
            size = sum(map(len, pages.values()))
            self._client.upload(name, size, pages.values(), no_limit)
            self._learn(identity, name)
            self._count({"behind_sent": len(pages)})
        with self._guard:
            for _ in range(min(len(slots), len(self._unsent))):
                self._unsent.popleft()

    def _read(self, read: Callable[[], list[T]]) -> list[T]:
        with self._reading:
            return [] if self._is_left else read()


def _name(identity: bytes, second: float) -> str:
    """How the names of objects begin that were sent in a second."""
    return f"{identity.hex()}/{int(second):010d}"


def _packed(indices: Iterable[int]) -> str:
    return base64.urlsafe_b64encode(b"".join(map(_INDEX.pack, indices))).decode()


def _pages_in(name: str) -> tuple[int, list[int]]:
    """The bytes of a page in an object, and the indices. Raises ValueError and struct.error for
    other names."""
    _, nbytes, raw = name.rpartition("/")[2].split(".")
    return int(nbytes), [each for (each,) in _INDEX.iter_unpack(base64.urlsafe_b64decode(raw))]
