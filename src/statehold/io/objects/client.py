"""Objects below one prefix of an object store: whole or missing, moved in parallel parts.

Owns: the accepted URLs and options of stores; the requests to `obstore`, the parts of a transfer,
and how many are under way; the names of failures.
Invariants: an object appears whole or not at all. A transfer has at most IN_FLIGHT_BYTES (or two
parts) in memory, whatever its size. A request, with its retries, ends within `deadline_s`. A
transfer consists of many requests, so it ends when the store stops answering, and not because it is
large. A signal, or stop(), ends the waiting for a request. The request goes on alone, and changes
nothing that the caller still uses. No secret is in a message, a log or a file of ours.
Not here: which objects make a step (steps/objects).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from statehold.errors import (
    ClosedError,
    InvariantError,
    MissingFileError,
    StateholdError,
    StorageError,
    TruncatedFileError,
    UnavailableError,
    UsageError,
    refused,
    shown,
    storage_error,
    storing,
)
from statehold.io.objects.parallel import Extent, apart, move
from statehold.process.whole_files import sync_files
from statehold.units import MiB

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

# -- the client ------------------------------------------------------------------------------------


PART_BYTES = 5 * MiB  # the least that S3 takes; twelve of them are under way
PARTS_MAX = 9_000  # of the 10,000 that S3 takes
IN_FLIGHT_BYTES = 64 * MiB
PIECE_BYTES = 4 * MiB  # passed on at once, and the unit of the throttle
COPY_BYTES = 1 * MiB  # copied at once: no other Python thread runs meanwhile
DEADLINE_S = 120.0
LATE_S = 2.0
AGAIN = 4  # more times for what can be repeated
GRACE_S = 5.0  # for requests under way after stop()
READ_BACK_BYTES = 64
NEW = ".new"  # ends the name of an object until its bytes are durable
# Such names. obstore adds # and a number until it has all bytes, and does not list these.
_UNFINISHED = f"*.{'[0-9a-f]' * 8}{NEW}"


def no_limit(_: int) -> None:
    """A throttle that never waits."""


class ObjectClient:
    """The objects below `url`. Thread-safe; connects at the first use.

    part_bytes: of uploads and downloads; S3 takes 5 MiB or more.
    late: called again and again while a request takes longer than LATE_S.

    The first upload is read back. A writable block is copied, so its owner may use its memory again
    at once. A read-only block is sent from its place, and stays alive until then.
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
        self.is_local = urlsplit(self.url).scheme == "file"
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
                raise too_large(self.path(name), bytes_max)
            return found.bytes().to_bytes()

        return self._ask("read", name, get)

    def size(self, name: str) -> int | None:
        """The size of an object; None if there is none."""
        with contextlib.suppress(MissingFileError):
            return self._ask("look at", name, lambda store: store.head(name)["size"])
        return None

    def put(self, name: str, data: bytes) -> None:
        """Create an object, or replace it, with one request."""
        self._ask("write", name, lambda store: self._put(store, name, data, use_multipart=False))

    def _put(self, store: ObjectStore, name: str, data: Any, **how: Any) -> None:
        """A store in files answers before the disk has an object. There it gets its name after, and
        another one before, which is of this call alone: several ranks may put it."""
        new = f"{name}.{secrets.token_hex(4)}{NEW}" if self.is_local else name
        store.put(new, data, **how)
        self._make_durable(new, names=False)
        if new != name:
            store.rename(new, name)
        self._make_durable(name, content=False)

    def has(self, name: str, size: int) -> bool:
        """Whether an object of this size is there, durably. Its maker may have died before that."""

        def look(store: ObjectStore) -> bool:
            is_there = store.head(name)["size"] == size
            if is_there:
                self._make_durable(name)
            return is_there

        with contextlib.suppress(MissingFileError):
            return self._ask("look at", name, look)
        return False

    def copy(self, source: str, target: str) -> None:
        """Create an object, or replace it, with the content of another one, inside the store."""
        self._ask("copy", source, lambda store: store.copy(source, target))

    def rename(self, name: str, new: str) -> None:
        """Give an object another name. A store that cannot do it at once has both meanwhile."""
        self._ask("rename", name, lambda store: store.rename(name, new))

    def list(self, directory: str | None = None) -> tuple[list[str], list[str]]:
        """The paths of objects, and of directories, directly below a directory, or the URL."""
        found = self._ask("list", directory or "", lambda s: s.list_with_delimiter(directory))
        return [entry["path"] for entry in found["objects"]], [*found["common_prefixes"]]

    def list_all(self, directory: str, after: str | None = None) -> Sequence[str]:
        """The paths of all objects below a directory, or of those that sort behind a path."""
        found = self._ask("list", directory, lambda s: s.list(directory, offset=after).collect())
        return [entry["path"] for entry in found]

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(MissingFileError):
            self._ask("delete", name, lambda store: store.delete(name))

    def delete_below(self, directory: str) -> None:
        """Delete all objects of a directory. A name beside it that was deleted never comes back
        without them."""

        def delete(store: ObjectStore) -> None:
            self._make_durable(directory, content=False)
            store.delete(paths)

        with contextlib.suppress(MissingFileError):  # another process deletes it, too
            self.tidy(directory)
            paths = self.list_all(directory)
            self._ask("delete", directory, delete)

    def tidy(self, directory: str = "") -> None:
        """In a store in files: delete what killed uploads have left of objects directly below a
        directory, or the URL, and an empty directory. Nobody uploads anything there now."""
        if self.is_local:
            folder = self._file(directory)
            with storing("delete", str(folder)):
                for path in (*folder.glob(_UNFINISHED), *folder.glob(f"{_UNFINISHED}#*")):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty
                if directory:
                    folder.rmdir()

    # -- uploads ---------------------------------------------------------------------------

    def upload(
        self, name: str, size: int, blocks: Iterable[memoryview], before: Callable[[int], None]
    ) -> None:
        """Create an object from the `size` bytes of `blocks`, in parts. See ObjectSteps.upload."""
        source = _Source(blocks, size, before)
        part_bytes, in_flight = parts_of(size, self._part_bytes)
        is_small = size <= part_bytes

        def put(store: ObjectStore) -> None:
            data = b"".join(source) if is_small else iter(source)
            parts = {"chunk_size": part_bytes, "max_concurrency": in_flight}
            self._put(store, name, data, use_multipart=not is_small, **parts)

        try:
            self._ask("write", name, put, again=0)  # the blocks come once
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

    def fetch(self, name: str, targets: Sequence[Extent]) -> None:
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

        data = self._again(partial(self._named, "read", name, get), AGAIN)
        if data is None or len(data) != len(target):
            raise truncated(self.path(name), end)
        target[:] = memoryview(data)

    def _ask(
        self, operation: str, name: str, action: Callable[[ObjectStore], T], again: int = AGAIN
    ) -> T:
        ask = partial(self._named, operation, name, action)
        return apart(lambda: self._again(ask, again), self._check_waiting)

    def _named(self, operation: str, name: str, action: Callable[[ObjectStore], T]) -> T:
        return naming(operation, self.path(name), lambda: action(self._store()))

    def _again(self, ask: Callable[[], T], again: int) -> T:
        """Ask, and up to `again` times more if an answer breaks off in its body: obstore repeats a
        request, but not such a one."""
        until_s = time.monotonic() + self._deadline_s / 2
        for _ in range(again):
            try:
                return ask()
            except UnavailableError as error:
                if error.errno != errno.ECONNRESET or time.monotonic() > until_s:
                    raise
        return ask()

    def _make_durable(self, name: str, *, content: bool = True, names: bool = True) -> None:
        """In a store in files: sync an object, and its name in the directories above."""
        if self.is_local:
            path = self._file(name)
            with storing("make durable", str(path)):
                sync_files([path] * content + [*path.parents] * names)

    def _file(self, name: str) -> Path:
        """An object of a store in files."""
        return Path(unquote(urlsplit(self.url).path), name)

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


# -- the address of a store ------------------------------------------------------------------------
# Credentials come only from the environment, where obstore finds them (AWS_*, GOOGLE_*, AZURE_*, or
# the role of the machine). URLs and options with credentials are refused. There is a list of
# accepted options, not of refused ones, so a secret under an unexpected name is refused, too.

SCHEMES = ("s3", "gs", "az", "file", "memory")
STORE_OPTIONS = {
    "account_name",
    "checksum_algorithm",
    "endpoint",
    "region",
    "server_side_encryption",
    "skip_signature",
    "sse_bucket_key_enabled",
    "sse_kms_key_id",
    "unsigned_payload",
    "virtual_hosted_style_request",
}
CLIENT_OPTIONS = {"allow_http", "root_certificate"}

_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
_HINT = (
    "credentials are taken from the environment (AWS_ACCESS_KEY_ID and its like), "
    "so that no file, message or log holds them"
)


def check_url(url: str) -> str:
    """`url`, without a slash at its end, if it is one of an object store and holds no secret."""
    parts = urlsplit(url)
    if _has_more(parts):
        facts = {"url": _shown(parts), "expected": "no user, password, query or fragment in it"}
        raise UsageError("not the URL of an object store", facts=facts, hint=_HINT)
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        meant = f"file:///{parts.netloc}{parts.path}" if parts.netloc else "file:///tmp/store"
        raise UsageError(
            "a store in files is named by three slashes and an absolute path",
            facts={"url": _shown(parts), "expected": f"such as {meant}"},
        )
    needs_bucket = parts.scheme in _ALLOW_HTTP
    if parts.scheme not in SCHEMES or (needs_bucket and not parts.netloc):
        schemes = "s3://bucket/prefix, gs://..., az://..., file:///path or memory://"
        raise refused("not the URL of an object store", schemes, _shown(parts))
    return url if parts.scheme == "memory" else url.rstrip("/")


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `options`, if all of them are known and none holds a secret."""
    if not isinstance(options, Mapping):
        raise refused("the options of an object store are a dict", "such as {}", shown(options))
    unknown = sorted(options.keys() - STORE_OPTIONS - CLIENT_OPTIONS)
    if unknown:
        expected = ", ".join(sorted(STORE_OPTIONS | CLIENT_OPTIONS))
        facts = {"option": shown(unknown[0]), "expected": f"one of {expected}"}
        raise UsageError("not an option of an object store", facts=facts, hint=_HINT)
    endpoint = urlsplit(str(options.get("endpoint", "")))
    if _has_more(endpoint):
        facts = {"endpoint": _shown(endpoint), "expected": "no user, password or query in it"}
        raise UsageError("not the address of an object store", facts=facts, hint=_HINT)
    return dict(options)


def around(one: str, other: str) -> tuple[str, str, str] | None:
    """The URL of the smallest store that has everything below both checked URLs.

    Returned with it: the beginnings of their names in it, which are empty or end with a slash. None
    if the URLs are equal, in two stores or two trees of files, or if one of them is in memory.
    """
    first, second = urlsplit(one), urlsplit(other)
    if first[:2] != second[:2] or first.scheme == "memory":
        return None
    paths = [[part for part in each.path.split("/") if part] for each in (first, second)]
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False))
    same = [part for part, _ in pairs]
    if paths[0] == paths[1] or (not same and first.scheme == "file"):
        return None
    names = [unquote("".join(f"{part}/" for part in path[len(same) :])) for path in paths]
    root = "/".join([f"{first.scheme}://{first.netloc}", *same])
    return root, names[0], names[1]


def open_store(url: str, options: Mapping[str, Any], deadline_s: float) -> ObjectStore:
    """The store at a checked `url`. A request and its retries take `deadline_s` at most."""
    try:
        from obstore.store import MemoryStore, from_url
    except ImportError:
        hint = "pip install 'statehold[objects]', or: pip install obstore"
        raise UsageError("an object store needs the package obstore", hint=hint) from None
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return MemoryStore()
    if scheme == "file":
        return from_url(url, mkdir=True, automatic_cleanup=True)
    config = {name: value for name, value in options.items() if name in STORE_OPTIONS}
    client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
    # Options of the client replace all options of the environment.
    client.setdefault("allow_http", _is_true(os.environ.get(_ALLOW_HTTP[scheme], "")))
    half = timedelta(seconds=deadline_s / 2)
    # No retry begins after one half of the time, and the last one ends within the other half.
    return from_url(  # type: ignore[call-overload,no-any-return]  # the scheme decides, at run time
        url,
        config=config,
        client_options={**client, "timeout": half, "connect_timeout": min(half, _CONNECT)},
        retry_config={"max_retries": 1000, "retry_timeout": half, "backoff": _BACKOFF},
    )


_CONNECT = timedelta(seconds=10)
_BACKOFF = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=5),
    "base": 2,
}


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on", "y")


def _has_more(parts: SplitResult) -> bool:
    return bool("@" in parts.netloc or parts.query or parts.fragment)


def _shown(parts: SplitResult) -> str:
    """The part of the URL that cannot hold a secret."""
    scheme = f"{parts.scheme}://" if parts.scheme else ""
    return f"{scheme}{parts.netloc.rpartition('@')[2]}{parts.path}"[:200]


# -- failures --------------------------------------------------------------------------------------
# No text of obstore is passed on, because it quotes URLs with signatures, tokens and passwords. A
# message consists of recognised parts: an HTTP status, the code of the store, an errno, the kind of
# transport failure. The original error is not chained.


T = TypeVar("T")

_STATUS = re.compile(r"status code: ([1-5][0-9]{2})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_OS_ERROR = re.compile(r"\(os error ([0-9]{1,3})\)")
_PAST_END = re.compile(r"status code: 416\b|StartTooLarge")
_NO_RANGE = re.compile(r"NotPartial|NoContentRange|UnexpectedRange|\w+ContentRange\b")
# What stores, and those who check certificates and tokens, say to a machine whose clock is wrong.
_SKEWED = re.compile(
    r"RequestTimeTooSkewed|RequestExpired|RequestInTheFuture|Signature (?:not yet current|expired)"
    r"|Request date header too old|iat and exp|NotValidYet|certificate has expired"
    r"|InvalidCertificate\(Expired"
)
_BUSY = {"408", "429", "500", "502", "503", "504"}
_DENIED = {"401", "403"}
_DENIED_KINDS = {"PermissionDeniedError", "UnauthenticatedError"}
_FULL = {"507", "QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"}
# Debug texts of the transport, and the errno with the same meaning. The first match counts, so
# texts from closest to the wire come first.
_TRANSPORT = {
    "ConnectionRefused": errno.ECONNREFUSED,
    "TimedOut": errno.ETIMEDOUT,
    "kind: Timeout": errno.ETIMEDOUT,
    "ConnectionReset": errno.ECONNRESET,
    "BrokenPipe": errno.ECONNRESET,
    "IncompleteMessage": errno.ECONNRESET,
    "kind: Connect": errno.EHOSTUNREACH,
    "kind: Interrupted": errno.ECONNRESET,
    "BadScheme": errno.EPROTONOSUPPORT,
    "HTTP error": errno.EPROTO,
}
_DENIED_HINT = (
    "credentials come from the environment: check that they are set and may use this bucket"
)
_LATER_HINT = "committed steps are untouched; try again later"
_CLOCK_HINT = (
    "the clock of this machine and that of the store differ: set this clock (date -u shows it; "
    "chronyd or systemd-timesyncd keeps it right), or let the store renew what has expired"
)
_HTTP_HINT = 'http:// without encryption needs options={"allow_http": True}, or AWS_ALLOW_HTTP=true'


def missing(operation: str, path: str) -> MissingFileError:
    return MissingFileError("a file does not exist", facts={"file": path, "during": operation})


def truncated(path: str, end: int) -> TruncatedFileError:
    facts = {"file": path, "ends before": f"{end} bytes", "during": "read"}
    return TruncatedFileError("a file ends before the bytes it should hold", facts=facts)


def too_large(path: str, bytes_max: int) -> StorageError:
    facts = {"expected": f"at most {bytes_max} bytes"}
    return StorageError("cannot read", errno=errno.EFBIG, path=path, facts=facts)


def not_given_back(operation: str, path: str) -> StorageError:
    return StorageError(
        f"cannot {operation}",
        errno=errno.EPROTO,
        path=path,
        facts={"expected": "the range that was asked for", "got": "something else"},
        hint="the store does not give back parts of objects, so no step can be restored from it. "
        "Another server for the same storage may",
    )


def is_past_end(fault: Exception) -> bool:
    """Whether obstore says that a range begins after the end of an object."""
    return _PAST_END.search(str(fault)) is not None


def naming(operation: str, path: str, action: Callable[[], T]) -> T:
    """The result of `action`. An error of obstore becomes an error of ours, unchained."""
    try:
        return action()
    except StateholdError:
        raise
    except Exception as fault:
        error = _named(fault, operation, path)
    # This is outside of the handler, and not in a context manager. Otherwise the error of obstore,
    # with everything that it quotes, would become the context of this error, and appear in every
    # traceback and error report.
    raise error


def _named(fault: Exception, operation: str, path: str) -> StateholdError:
    text = str(fault)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    # In a write, it is an upload that has ended before: the store's answer was lost.
    if isinstance(fault, FileNotFoundError) and code != "NoSuchBucket" and operation != "write":
        return missing(operation, path)
    if _NO_RANGE.search(text):
        return not_given_back(operation, path)
    if type(fault).__name__ in _DENIED_KINDS:
        status = status or "403"
    error = _refusal(status, code, operation, path) if status else _transport(text, operation, path)
    if _SKEWED.search(text):
        error.hint = _CLOCK_HINT
    return error


def _refusal(status: str, code: str | None, operation: str, path: str) -> StorageError:
    """The error for an unexpected answer."""
    if {status, code} & _FULL:
        return storage_error(operation, errno.ENOSPC, path)
    kind, number, hint = StorageError, errno.EIO, None
    if code == "NoSuchBucket":
        number = errno.ENOENT
    elif status in _DENIED:
        number, hint = errno.EACCES, _DENIED_HINT
    elif status in _BUSY:
        kind, number, hint = UnavailableError, errno.EAGAIN, _LATER_HINT
    facts = {"answer": " ".join(filter(None, [status, code]))}
    return kind(f"cannot {operation}", errno=number, path=path, facts=facts, hint=hint)


def _transport(text: str, operation: str, path: str) -> StorageError:
    """The error for a missing or incomplete answer, or of the local disk (file://)."""
    number = next((number for sign, number in _TRANSPORT.items() if sign in text), None)
    if number is None or "Generic LocalFileSystem" in text:
        local = _first(_OS_ERROR, text)
        return storage_error(operation, int(local) if local else errno.EIO, path)
    hint = _HTTP_HINT if number == errno.EPROTONOSUPPORT else _LATER_HINT
    return UnavailableError(f"cannot {operation}", errno=number, path=path, hint=hint)


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
