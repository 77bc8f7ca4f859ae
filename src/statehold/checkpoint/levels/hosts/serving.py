"""The steps on this host, for the other hosts of the job: a server in each rank's process.

    asked     ["PLACE/STEP/NAME", begin, end], or with null for the end: all of the file
    answered  [begin, end, bytes of the file], and the bytes; or [a reason of REASONS, bytes]

Owns: the port, the connections; the meaning of a path, and how it is opened.
Invariants: read-only. Nobody is answered before let_in() says the secret. At most CONNECTIONS_MAX
connections; the one that has been idle for longest is closed first. A request has a thread while it
is answered. The threads keep no process from ending.
A path is matched as it came, without decoding. Each part is opened below the one before it, and no
link is followed. A save does not overwrite a file that is open here (Store). A file that was
retired before has no name here.
Not here: who is let in, and when a connection ends (net/reception), the client (remote).
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from statehold.encoding import strictjson
from statehold.errors import UsageError, shown
from statehold.net import addresses
from statehold.net.reception import Guest, Reception
from statehold.net.secret import of_job
from statehold.net.wire import Wire
from statehold.process.warn import logger
from statehold.steps.directories import REPLACED, step_of
from statehold.steps.objects import is_file_name

DOOR = "files"
CONNECTIONS_MAX = 64
REQUEST_MAX = 8 << 10
IDLE_S = 120.0  # until the other end has taken some more of an answer
ABSENT, ENDS, UNREADABLE = REASONS = ("absent", "ends", "unreadable")

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
            case [place, step, name] if (
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
        self.address = ""
        self._listener: socket.socket | None = None
        self._reception: Reception | None = None

    def start(self) -> None:
        """Listen from now on at `address` ("host:port").

        Raises UsageError for an address that this host does not have.
        """
        host = self._asked or addresses.reachable_address(os.environ.get("MASTER_ADDR", ""))
        hint = "address= takes an address of this host that the others reach"
        self._listener = addresses.listener("the server of files", host, hint=hint)
        self.address = addresses.joined(*self._listener.getsockname()[:2])

    def let_in(self, secret: str) -> None:
        """Answer who knows this secret, and that of the job. Who came before has waited."""
        if self._listener is not None and self._reception is None:
            self._reception = Reception(
                [self._listener], DOOR, of_job(secret), frame_max=REQUEST_MAX, most=CONNECTIONS_MAX
            )
            self._reception.start("statehold-files", partial(self._hear, self._reception))

    def close(self) -> None:
        """Hang up, and free the port."""
        if self._reception is not None:
            self._reception.close()
        elif self._listener is not None:
            self._listener.close()
        self._listener = None

    # -- requests --------------------------------------------------------------------------

    def _hear(self, reception: Reception, guest: Guest, request: bytes) -> None:
        asked = _asked(request)
        answer = partial(self._answer, reception, guest, *asked)
        threading.Thread(target=answer, name="statehold-files", daemon=True).start()
        reception.lend(guest)  # last: a guest for whom there is no thread has to go

    def _answer(
        self, reception: Reception, guest: Guest, path: str, begin: int, end: int | None
    ) -> None:
        try:
            self._send(guest.wire, path, begin, end)
        except Exception as error:  # of a connection, or of a file: the end of this one alone
            logger.debug("a connection to the files of this host ended: %s", error)
            guest.wire.close()
        reception.returned(guest)

    def _send(self, wire: Wire, path: str, begin: int, end: int | None) -> None:
        until = time.monotonic() + IDLE_S
        try:
            with self._served.open(path) as (descriptor, nbytes):
                end = nbytes if end is None else end
                if not begin <= end <= nbytes:
                    wire.send(json.dumps([ENDS, nbytes]).encode(), until)
                    return
                wire.send(json.dumps([begin, end, nbytes]).encode(), until)
                wire.send_file(descriptor, begin, end, IDLE_S)
        except FileNotFoundError:
            wire.send(json.dumps([ABSENT, 0]).encode(), until)
        except UnreadableError:
            logger.warning("cannot serve a file of this host to another one", exc_info=True)
            wire.send(json.dumps([UNREADABLE, 0]).encode(), until)


def _asked(request: bytes) -> tuple[str, int, int | None]:
    """The path and the range of a request. Raises ValueError."""
    match strictjson.message(request):
        case [str(path), int(begin), int(end)] if 0 <= begin < end <= strictjson.INT_MAX:
            return path, begin, end
        case [str(path), 0, None]:
            return path, 0, None
    raise ValueError("not a request for a file")
