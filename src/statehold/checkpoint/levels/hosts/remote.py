"""Files of committed steps on another host, read from the server of a rank there.

Owns: the requests to that server (serving), their connections, and the names of failures.
Invariants: a request ends within `deadline_s` with all of its bytes, or a named error, whatever the
other end does. A large read is many requests, each of PART_BYTES at most. A request whose
connection breaks is repeated once, on a new one. No error and no repr has the secret.
Not here: whether the bytes are right (steps/copying, the engine), which host to ask (place), what
is asked and answered (serving).
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from statehold.checkpoint.levels.hosts.serving import ABSENT, DOOR, ENDS, REASONS
from statehold.encoding import strictjson
from statehold.errors import (
    StateholdError,
    StorageError,
    TruncatedFileError,
    UnavailableError,
    storage_error,
)
from statehold.io.objects.parallel import Extent, move
from statehold.net import addresses
from statehold.net.secret import of_job
from statehold.net.wire import SecretError, Wire, connect
from statehold.steps.shelf import FetchedFile, ShelfFile

DEADLINE_S = 60.0
PART_BYTES = 8 << 20
CONNECTIONS = 4  # of one large read, and kept for the next
_ANSWER_MAX = 1 << 10

T = TypeVar("T")


class FarFiles(Protocol):
    """The files of a store on another host; paths are "STEP/NAME"."""

    def read_file(self, path: str, max_bytes: int) -> bytes: ...
    def open_read(self, path: str) -> ShelfFile: ...
    def fetch(self, path: str, targets: Sequence[Extent]) -> None: ...


class RemoteFiles:
    """The steps of `place` on the host that serves at `address`.

    Paths are "STEP/NAME". Thread-safe; connects at the first use.
    idle: connections that later calls use.
    """

    def __init__(
        self, address: str, secret: str, place: str, *, deadline_s: float = DEADLINE_S
    ) -> None:
        self.url = f"{address}/{place}"
        self._address = addresses.split(address)
        self._place = place
        self._secret = of_job(secret)
        self._deadline_s = deadline_s
        self._guard = threading.Lock()
        self.idle: list[Wire] = []

    def __repr__(self) -> str:
        return f"RemoteFiles({self.url!r})"

    def read_file(self, path: str, max_bytes: int) -> bytes:
        """All of a file of at most `max_bytes`."""

        def read(wire: Wire, until: float) -> bytes:
            _, nbytes = self._ask(wire, path, 0, None, until)
            if nbytes > max_bytes:
                facts = {"expected": f"at most {max_bytes} bytes", "got": f"{nbytes} bytes"}
                where = f"{self.url}/{path}"
                raise StorageError("cannot read", errno=errno.EFBIG, path=where, facts=facts)
            return wire.read(nbytes, until)

        return self._request("read", path, read)

    def open_read(self, path: str) -> ShelfFile:
        """A file, for reading in any order; the first read sends the first request."""
        return FetchedFile(partial(self.fetch, path))

    def fetch(self, path: str, targets: Sequence[Extent]) -> None:
        """Fill memory with ranges of a file, over several connections."""
        move(targets, PART_BYTES, partial(self._fetch_part, path), CONNECTIONS)

    def close(self) -> None:
        """End connections; the next use makes new ones."""
        with self._guard:
            idle, self.idle = self.idle, []
        for wire in idle:
            wire.close()

    # -- what is asked ---------------------------------------------------------------------

    def _fetch_part(self, path: str, begin: int, target: memoryview) -> None:
        self._request(
            "read", path, lambda wire, until: self._read(wire, path, begin, target, until)
        )

    def _read(self, wire: Wire, path: str, begin: int, target: memoryview, until: float) -> None:
        end = begin + len(target)
        if self._ask(wire, path, begin, end, until) != (begin, end):
            raise ValueError("the answer has another range than the request")
        wire.fill(target, until)

    def _ask(
        self, wire: Wire, path: str, begin: int, end: int | None, until: float
    ) -> tuple[int, int]:
        """The range of the bytes that follow."""
        wire.send(json.dumps([f"{self._place}/{path}", begin, end]).encode(), until)
        match strictjson.message(wire.receive(until)):
            case [int(first), int(last), int(nbytes)] if 0 <= first <= last <= nbytes:
                return first, last
            case [str(reason), int(nbytes)] if reason in REASONS:
                raise self._refusal(reason, nbytes, path)
        raise ValueError("not the answer to a request for a file")

    def _refusal(self, reason: str, nbytes: int, path: str) -> StateholdError:
        """The error for an answer without bytes."""
        where = f"{self.url}/{path}"
        if reason == ABSENT:
            return storage_error("read from another host", errno.ENOENT, where)
        if reason == ENDS:
            facts = {"file": where, "ends at": f"{nbytes} bytes"}
            return TruncatedFileError("a file ends before the bytes it should hold", facts=facts)
        return _unavailable("read from another host", errno.EIO, where)

    # -- connections -----------------------------------------------------------------------

    def _request(self, operation: str, path: str, ask: Callable[[Wire, float], T]) -> T:
        """The result of `ask` on a connection, within the deadline; failures get their names."""
        where = f"{self.url}/{path}"
        until = time.monotonic() + self._deadline_s
        try:
            return self._twice(ask, until)
        except StateholdError:
            raise
        except SecretError:
            raise storage_error("read from another host", errno.EACCES, where) from None
        except (ValueError, ConnectionAbortedError) as error:
            raise self._garbage(operation, path, str(error)) from None
        except TimeoutError:
            raise _unavailable(operation, errno.ETIMEDOUT, where) from None
        except OSError as error:
            raise _unavailable(operation, error.errno or errno.EIO, where) from None

    def _twice(self, ask: Callable[[Wire, float], T], until: float) -> T:
        wire = self._take() or self._connected(until)
        try:
            return self._on(wire, ask, until)
        except (BrokenPipeError, ConnectionResetError):  # kept for too long, or just lost
            return self._on(self._connected(until), ask, until)

    def _on(self, wire: Wire, ask: Callable[[Wire, float], T], until: float) -> T:
        try:
            answer = ask(wire, until)
        except BaseException as error:
            # After a refusal without a body, the connection is as good as before.
            is_absent = isinstance(error, StorageError) and error.errno == errno.ENOENT
            if is_absent or isinstance(error, TruncatedFileError):
                self._keep(wire)
            else:
                wire.close()
            raise
        self._keep(wire)
        return answer

    def _connected(self, until: float) -> Wire:
        wire = connect(self._address, DOOR, self._secret, until)
        wire.frame_max = _ANSWER_MAX
        return wire

    def _take(self) -> Wire | None:
        """A connection that is open already, if it still is."""
        with self._guard:
            while self.idle:
                wire = self.idle.pop()
                if wire.is_quiet:
                    return wire
                wire.close()
        return None

    def _keep(self, wire: Wire) -> None:
        with self._guard:
            if len(self.idle) < CONNECTIONS and wire.is_quiet:
                self.idle.append(wire)
                return
        wire.close()

    def _garbage(self, operation: str, path: str, what: str) -> StorageError:
        return StorageError(
            f"cannot {operation}",
            errno=errno.EPROTO,
            path=f"{self.url}/{path}",
            facts={"got": what},
            hint="what answers there is no host of this job, or runs another version of statehold",
        )


def _unavailable(operation: str, number: int, where: str) -> UnavailableError:
    hint = "the host, or the process of its rank, may be gone"
    return UnavailableError(f"cannot {operation}", errno=number, path=where, hint=hint)
