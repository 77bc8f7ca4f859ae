"""The steps on this host, for the other hosts of the job: a server in each rank's process.

    GET /PLACE/STEP/NAME      Authorization: Bearer SECRET, and a Range if not all of it

Owns: the port, the connections, who may ask; the meaning of a path, and how it is opened.
Invariants: read-only. Nobody has the secret before let_in(), and no board has it. A client without
it learns nothing, and the server hangs up. Nothing is encrypted: the network is trusted as
torch.distributed trusts it. At most CONNECTIONS_MAX connections; the one that has been silent for
longest is closed first, and none may be silent for ever. The threads keep no process from ending. A
fork of the process neither answers nor holds the port.
A path is matched as it came, without decoding. Each part is opened below the one before it, and no
link is followed. A save does not overwrite a file that is open here (Store). A file that was
retired before has no name here.
Not here: the protocol on a connection (wire), the client (remote).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from statehold.checkpoint.levels.hosts.wire import MessageHead, Wire, WireError
from statehold.errors import UsageError, shown
from statehold.process import addresses
from statehold.process.forks import forget_in_children
from statehold.steps.directories import REPLACED, step_of
from statehold.steps.objects import is_file_name

logger = logging.getLogger("statehold")

CONNECTIONS_MAX = 64
FIRST_S = 10.0  # until the first request of a connection comes
IDLE_S = 120.0  # until the next one comes, or until the other end has taken some more of an answer
ROOM_S = 0.25  # how long a new connection waits for a place before a silent one is closed for it
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")

_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # the latter two: a link
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO has no reader to wait


class UnreadableError(Exception):
    """It exists, as far as one can tell, but the storage refuses it now."""


class Served:
    """The committed steps of the directories `roots`, by the names of their places."""

    def __init__(self, roots: Mapping[str, str]) -> None:
        for place in roots:
            if _PLACE.fullmatch(place) is None:
                raise UsageError("not a valid name of a place", facts={"got": shown(place)})
        self._roots = {place: os.path.realpath(root) for place, root in roots.items()}

    @contextmanager
    def open(self, path: str) -> Iterator[tuple[int, int]]:
        """(descriptor, bytes) of a file. Raises FileNotFoundError for other paths, and
        UnreadableError."""
        match path.split("/"):
            case ["", place, step, name] if (
                place in self._roots and step_of(step) is not None and is_file_name(name)
            ):
                with self._opened(place, step) as folder, _open(name, _FILE, folder) as descriptor:
                    found = os.fstat(descriptor)
                    if not stat.S_ISREG(found.st_mode):
                        raise FileNotFoundError
                    yield descriptor, found.st_size
            case _:
                raise FileNotFoundError

    @contextmanager
    def _opened(self, place: str, step: str) -> Iterator[int]:
        with _open(self._roots[place], _FOLDER) as root, ExitStack() as opened:
            yield _standing(step, root, opened)


def _standing(step: str, root: int, opened: ExitStack) -> int:
    """The directory of a step, which has another name for a moment while it is being replaced."""
    for name in (step, step + REPLACED):
        with suppress(FileNotFoundError):
            return opened.enter_context(_open(name, _FOLDER, root))
    return opened.enter_context(_open(step, _FOLDER, root))


@contextmanager
def _open(path: str, flags: int, folder: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in _ABSENT:
            raise FileNotFoundError from None
        raise UnreadableError(os.strerror(error.errno or 0)) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class FileServer:
    """Serves committed steps below `roots`, by the names of their places.

    `address`: of this host, on the network of the others; None: that of the way to
    MASTER_ADDR. close() may be called twice.
    """

    def __init__(self, roots: Mapping[str, str], address: str | None = None) -> None:
        self._served = Served(roots)
        self._asked = address
        self._secret = ""
        self._has_secret = threading.Event()
        self.address = ""
        self._listener: socket.socket | None = None
        self._guard = threading.Lock()
        self._wires: dict[Wire, float | None] = {}  # silent since then; None: it is being answered
        self._free = threading.Semaphore(CONNECTIONS_MAX)

    def start(self) -> None:
        """Answer from now on at `address` ("host:port").

        Raises UsageError for an address that this host does not have.
        """
        host = self._asked or addresses.reachable_address(os.environ.get("MASTER_ADDR", ""))
        try:
            self._listener = addresses.listen(host)
        except OSError as error:
            raise UsageError(
                "cannot serve files to other hosts at this address",
                facts={"address": host, "cause": str(error)},
                hint="address= takes an address of this host that the others reach",
            ) from None
        self.address = addresses.joined(*self._listener.getsockname()[:2])
        forget_in_children(self)
        self._in_thread(self._accept, self._listener)

    def let_in(self, secret: str) -> None:
        """Answer who has this secret, and nobody else. Who comes before waits a little."""
        self._secret = secret
        self._has_secret.set()

    def close(self) -> None:
        """Hang up, and free the port."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        listener.close()
        self._free.release()  # and the threads that wait for a place
        with self._guard:
            for wire in self._wires:
                wire.hang_up()

    def forget(self) -> None:
        """In a forked child."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        for wire in self._wires:
            wire.close()

    def _in_thread(self, run: Callable[..., None], *args: object) -> None:
        threading.Thread(target=run, args=args, name="statehold-files", daemon=True).start()

    # -- connections -----------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                if self._listener is None:
                    return
                time.sleep(0.1)  # out of descriptors, for example: later there may be some
                continue
            while not self._free.acquire(timeout=ROOM_S):
                self._drop_one()
            self._begin(Wire(connected))

    def _begin(self, wire: Wire) -> None:
        with self._guard:
            is_open = self._listener is not None
            if is_open:
                self._wires[wire] = time.monotonic()
        try:
            if is_open:
                self._in_thread(self._converse, wire)
                return
        except RuntimeError:  # no more threads
            logger.debug("cannot serve a connection", exc_info=True)
        self._end(wire)

    def _drop_one(self) -> None:
        """Hang up on the connection that has been silent for longest.

        Busy connections are waited for, and one that has only just connected will soon send a
        request.
        """
        newest = time.monotonic() - ROOM_S
        with self._guard:
            silent = {wire: since for wire, since in self._wires.items() if since is not None}
            oldest = min(silent, key=lambda wire: silent[wire], default=None)
            if oldest is not None and silent[oldest] <= newest:
                oldest.hang_up()

    def _end(self, wire: Wire) -> None:
        with self._guard:
            self._wires.pop(wire, None)
        wire.close()
        self._free.release()

    def _mark(self, wire: Wire, silent_since: float | None) -> None:
        with self._guard:
            self._wires[wire] = silent_since

    def _converse(self, wire: Wire) -> None:
        """Answer the requests of one connection until it ends."""
        patience_s = FIRST_S
        try:
            while True:
                head = wire.head(time.monotonic() + patience_s)
                self._mark(wire, None)
                if not self._answer(wire, head):
                    return
                patience_s = IDLE_S
                self._mark(wire, time.monotonic())
        except (OSError, EOFError, WireError) as error:
            logger.debug("a connection to the files of this host ended: %s", error)
        finally:
            self._end(wire)

    # -- requests --------------------------------------------------------------------------

    def _answer(self, wire: Wire, head: MessageHead) -> bool:
        """Answer a request; False: then hang up."""
        if len(head.words) != 3 or head.words[2] != "HTTP/1.1" or head.body_bytes:
            return _refuse(wire, "400 Bad Request", hang_up=True)
        given = head.fields.get("authorization", "").encode()
        is_known = self._has_secret.wait(FIRST_S)  # another rank may have heard of it before
        if not is_known or not hmac.compare_digest(given, f"Bearer {self._secret}".encode()):
            return _refuse(wire, "403 Forbidden", hang_up=True)
        method, path, _ = head.words
        if method != "GET":
            return _refuse(wire, "405 Method Not Allowed", hang_up=True)
        try:
            with self._served.open(path) as (descriptor, nbytes):
                return _send_file(wire, head, descriptor, nbytes)
        except FileNotFoundError:
            return _refuse(wire, "404 Not Found")
        except UnreadableError:
            logger.warning("cannot serve a file of this host to another one", exc_info=True)
            return _refuse(wire, "503 Service Unavailable")


def _send_file(wire: Wire, head: MessageHead, descriptor: int, nbytes: int) -> bool:
    asked = head.fields.get("range")
    match = _RANGE.fullmatch(asked) if asked is not None else None
    if asked is not None and match is None:
        return _refuse(wire, "400 Bad Request", hang_up=True)
    begin, end = (int(match[1]), int(match[2]) + 1) if match else (0, nbytes)
    if match and not begin < end <= nbytes:
        return _refuse(wire, "416 Range Not Satisfiable", {"Content-Range": f"bytes */{nbytes}"})
    fields = {"Content-Length": str(end - begin)}
    if match:
        fields["Content-Range"] = f"bytes {begin}-{end - 1}/{nbytes}"
    _send_head(wire, "206 Partial Content" if match else "200 OK", fields)
    wire.send_file(descriptor, begin, end, IDLE_S)
    return True


def _refuse(
    wire: Wire, status: str, fields: Mapping[str, str] = {}, *, hang_up: bool = False
) -> bool:
    ending = {"Connection": "close"} if hang_up else {}
    _send_head(wire, status, {"Content-Length": "0", **fields, **ending})
    return not hang_up


def _send_head(wire: Wire, status: str, fields: Mapping[str, str]) -> None:
    wire.send(MessageHead(("HTTP/1.1", status), fields).encode(), time.monotonic() + IDLE_S)
