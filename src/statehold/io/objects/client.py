"""Objects below one prefix of an object store: whole or missing, moved in parallel parts.

Owns: the requests to `obstore`, the parts of a transfer, and how many are under way.
Invariants: an object appears whole or not at all. A transfer has at most IN_FLIGHT_BYTES (or two
parts) in memory, whatever its size. A request, with its retries, ends within `deadline_s`. A
transfer consists of many requests, so it ends when the store stops answering, and not because it is
large. A signal, or stop(), ends the waiting for a request. The request goes on alone, and changes
nothing that the caller still uses. The first upload is read back. A writable block is copied, so
its owner may use its memory again at once. A read-only block is sent from its place, and stays
alive until then.
Not here: which objects make a step (checkpoint/store/objects), addresses and credentials (address),
the names of failures (errors).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from statehold.errors import ClosedError, InvariantError, MissingFileError, StateholdError
from statehold.io.objects.address import around, check_options, check_url, open_store
from statehold.io.objects.errors import (
    is_past_end,
    naming,
    not_given_back,
    too_large,
    truncated,
)
from statehold.io.objects.parallel import Target, apart, move
from statehold.units import MiB

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

PART_BYTES = 5 * MiB  # the least that S3 takes; twelve of them are under way
PARTS_MAX = 9_000  # of the 10,000 that S3 takes
IN_FLIGHT_BYTES = 64 * MiB
PIECE_BYTES = 4 * MiB  # passed on at once, and the unit of the throttle
COPY_BYTES = 1 * MiB  # copied at once: no other Python thread runs meanwhile
DEADLINE_S = 120.0
LATE_S = 2.0
GRACE_S = 5.0  # for requests under way after stop()
READ_BACK_BYTES = 64

T = TypeVar("T")


def no_limit(_: int) -> None:
    """A throttle that never waits."""


class ObjectClient:
    """The objects below `url`. Thread-safe; connects at the first use.

    part_bytes: of uploads and downloads; S3 takes 5 MiB or more.
    late: called again and again while a request takes longer than LATE_S.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        deadline_s: float = DEADLINE_S,
        part_bytes: int = PART_BYTES,
        late: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = check_url(url)
        self._late = late
        self._options = check_options(options)
        self._deadline_s = deadline_s
        self._part_bytes = part_bytes
        self._guard = threading.Lock()
        self._opened: ObjectStore | None = None
        self._stopped_s = math.inf  # when stop() was called
        self._hasty: ObjectClient | None = None
        self._is_read_back = False

    def path(self, name: str) -> str:
        """The object `name`, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def stop(self) -> None:
        """Wait no longer than GRACE_S for what is under way, and for nothing more."""
        self._stopped_s = min(self._stopped_s, time.monotonic())
        if self._hasty is not None:
            self._hasty.stop()

    def hasty(self, deadline_s: float, late: Callable[[], None]) -> ObjectClient:
        """A client of the same objects, for questions that somebody waits for."""
        if urlsplit(self.url).scheme in ("memory", "file"):
            return self
        least_s = min(deadline_s, self._deadline_s)
        with self._guard:
            self._hasty = self._hasty or ObjectClient(
                self.url, self._options, deadline_s=least_s, late=late
            )
            return self._hasty

    def around(self, url: str) -> tuple[ObjectClient, str, str] | None:
        """A client with the same options that also sees `url`, if both are in one store.

        With it, the beginnings of the names there: of the objects below `url`, and of those of this
        client.
        """
        found = around(check_url(url), self.url)
        if found is None:
            return None
        root, theirs, ours = found
        return ObjectClient(root, self._options, deadline_s=self._deadline_s), theirs, ours

    # -- objects ---------------------------------------------------------------------------

    def get(self, name: str, bytes_max: int) -> bytes:
        """The content of an object of at most `bytes_max`."""

        def get(store: ObjectStore) -> bytes:
            found = store.get(name)
            if found.meta["size"] > bytes_max:
                raise too_large("read", self.path(name), bytes_max)
            return found.bytes().to_bytes()

        return self._ask("read", name, get)

    def size(self, name: str) -> int | None:
        """The size of an object; None if there is none."""
        with contextlib.suppress(MissingFileError):
            return self._ask("look at", name, lambda store: store.head(name)["size"])
        return None

    def put(self, name: str, data: bytes) -> None:
        """Create an object, or replace it, with one request."""
        self._ask("write", name, lambda store: store.put(name, data, use_multipart=False))

    def copy(self, source: str, target: str) -> None:
        """Create an object, or replace it, with the content of another one, inside the store."""
        self._ask("copy", source, lambda store: store.copy(source, target))

    def list(self, directory: str | None = None) -> tuple[list[str], list[str]]:
        """The paths of objects, and of directories, directly below a directory, or the URL."""
        found = self._ask(
            "list", directory or "", lambda store: store.list_with_delimiter(directory)
        )
        return [entry["path"] for entry in found["objects"]], [*found["common_prefixes"]]

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(MissingFileError):
            self._ask("delete", name, lambda store: store.delete(name))

    def delete_below(self, directory: str) -> None:
        """Delete all objects of a directory."""

        def delete(store: ObjectStore) -> None:
            for entries in store.list(directory):
                store.delete([entry["path"] for entry in entries])

        with contextlib.suppress(MissingFileError):  # another process deletes it, too
            self._ask("delete", directory, delete)

    # -- uploads ---------------------------------------------------------------------------

    def upload(
        self, name: str, size: int, blocks: Iterable[memoryview], before: Callable[[int], None]
    ) -> None:
        """Create an object from the `size` bytes of `blocks`, in parts. See ObjectSteps.upload."""
        source = _Source(blocks, size, before)
        part_bytes, in_flight = parts_of(size, self._part_bytes)
        is_small = size <= part_bytes

        def put(store: ObjectStore) -> None:
            store.put(
                name,
                b"".join(source) if is_small else iter(source),
                use_multipart=not is_small,
                chunk_size=part_bytes,
                max_concurrency=in_flight,
            )

        try:
            self._ask("write", name, put)
        except StateholdError:
            if source.failure is None:
                raise
        if source.failure is not None:
            raise source.failure
        self._is_read_back = self._is_read_back or self._read_back(name, source.begin)

    def _read_back(self, name: str, begin: bytes) -> bool:
        """Raise if the store does not give a range of a new object back, whose `begin` is this.

        Otherwise all steps would be committed there, and none could be restored. False if the
        object is too small to tell.
        """
        got = bytearray(max(0, len(begin) - 1))
        self.fetch(name, [(1, memoryview(got))])
        if got != begin[1:]:
            raise not_given_back("read", self.path(name))
        return bool(got)

    # -- downloads -------------------------------------------------------------------------

    def fetch(self, name: str, targets: Sequence[Target]) -> None:
        """Fill memory with ranges of an object, in parallel parts."""
        threads = max(2, IN_FLIGHT_BYTES // self._part_bytes)
        fetch_part = partial(self._fetch_part, name)
        apart(lambda: move(targets, self._part_bytes, fetch_part, threads), self._check_waiting)

    def _fetch_part(self, name: str, begin: int, target: memoryview) -> None:
        end = begin + len(target)

        def get(store: ObjectStore) -> Bytes | None:
            try:
                return store.get_range(name, start=begin, end=end)
            except Exception as fault:
                if not is_past_end(fault):
                    raise
                return None

        data = naming("read", self.path(name), lambda: get(self._store()))
        if data is None or len(data) != len(target):
            raise truncated("read", self.path(name), end)
        target[:] = memoryview(data)

    def _ask(self, operation: str, name: str, action: Callable[[ObjectStore], T]) -> T:
        path = self.path(name)
        return apart(
            lambda: naming(operation, path, lambda: action(self._store())), self._check_waiting
        )

    def _check_waiting(self, waited_s: float) -> None:
        if waited_s > LATE_S:
            self._late()
        if time.monotonic() > self._stopped_s + GRACE_S:
            raise ClosedError("a request to an object store was given up", facts={"url": self.url})

    def _store(self) -> ObjectStore:
        with self._guard:
            if self._opened is None:
                self._opened = open_store(self.url, self._options, self._deadline_s)
            return self._opened


def parts_of(size: int, part_bytes: int) -> tuple[int, int]:
    """(bytes of a part, parts in flight) for an upload of `size` bytes."""
    part_bytes = max(part_bytes, -(-size // PARTS_MAX))
    return part_bytes, max(2, IN_FLIGHT_BYTES // part_bytes)


class _Source:
    """The bytes of `blocks` in pieces that do not change: exactly `size` bytes, or a failure.

    `failure` is the exception raised while the blocks were made. The upload raises it, and not the
    store's error that follows from it. `begin`: the first bytes.
    """

    def __init__(
        self, blocks: Iterable[memoryview], size: int, before: Callable[[int], None]
    ) -> None:
        self._blocks = blocks
        self._size = size
        self._before = before
        self._spare: deque[bytearray] = deque()
        self.begin = b""
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[memoryview]:
        try:
            yield from self._pieces()
        except Exception as error:
            self.failure = error
            raise

    def _pieces(self) -> Iterator[memoryview]:
        left = self._size
        for block in self._blocks:
            view = memoryview(block).cast("B")
            left -= len(view)
            if left < 0:
                break
            self.begin = self.begin or bytes(view[:READ_BACK_BYTES])
            step = PIECE_BYTES if view.readonly else COPY_BYTES
            for begin in range(0, len(view), step):
                piece = view[begin : begin + step]
                self._before(len(piece))
                yield piece if piece.readonly else self._copied(piece)
        if left:
            what = "more" if left < 0 else f"{self._size - left}"
            facts = {"expected": f"{self._size} bytes", "got": what}
            raise InvariantError("a file has another size than announced", facts=facts)

    def _copied(self, piece: memoryview) -> memoryview:
        """A copy in memory that is reused after it was sent, because fresh memory costs three
        copies."""
        buffer = self._spare.popleft() if self._spare else bytearray(COPY_BYTES)
        copy = memoryview(buffer)[: len(piece)]
        copy[:] = piece
        weakref.finalize(copy, self._spare.append, buffer).atexit = False
        return copy
