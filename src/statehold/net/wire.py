"""Wire: one connection between processes of a job: frames, bytes, and the time for all of it.

    wire = connect(address, door, secret, until)      both ends know the secret now

    wire.send(frame, until)      wire.receive(until)       a frame: four bytes of length, and it
    wire.pour(data, until)       wire.fill(memory, until)  bytes of a known length
    wire.put(frame), wire.flush(), wire.frames()           of a thread that selects: no call waits

Invariants: whatever the other end sends or does not send, a call ends by its moment `until` of
time.monotonic(), with TimeoutError or another OSError, and within moments when `revoked` is set.
A frame comes out once, whole, in order. One of more than `frame_max` bytes ends the connection
before it takes memory, and so does a peer that reads nothing while UNSENT_MAX bytes wait for it.
A forked child closes its copies: a connection ends with the process that made it.
Not here: who is let in (reception), what a frame means.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterator

from statehold.net import addresses
from statehold.net.secret import ENVIRONMENT, GREETING_BYTES, PROOF_BYTES, Secret, is_same
from statehold.process.forks import forget_in_children
from statehold.process.worker import Flag

FRAME_MAX = 64 << 20
UNSENT_MAX = 64 << 20
_READ = 1 << 16
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
# Between two looks at `revoked`; without it, nobody looks.
_POLL_S, _SLEEP_S = 0.01, 60.0


class SecretError(PermissionError):
    """The other end knows another secret."""


class Wire:
    """A connected socket, which it owns. Not thread-safe, except for hang_up()."""

    def __init__(
        self, connected: socket.socket, frame_max: int = FRAME_MAX, revoked: Flag | None = None
    ) -> None:
        self.socket = connected
        self.frame_max = frame_max
        self._revoked = revoked
        self._in = bytearray()
        self._out = bytearray()
        forget_in_children(self)
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it has ended already
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # -- without waiting -------------------------------------------------------------------

    def pull(self) -> int:
        """Take what has come, and say how many bytes are here now.

        ConnectionError: the other end has closed.
        """
        with contextlib.suppress(BlockingIOError):
            found = self.socket.recv(_READ)
            if not found:
                raise ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
            self._in += found
        return len(self._in)

    def taken(self, nbytes: int) -> bytes | None:
        """The next bytes of what was pulled; None while there are fewer."""
        if len(self._in) < nbytes:
            return None
        found = bytes(self._in[:nbytes])
        del self._in[:nbytes]
        return found

    def frames(self) -> Iterator[bytes]:
        """The frames that are whole by now. ConnectionError: there will be no more."""
        self.pull()
        while (frame := self._frame()) is not None:
            yield frame

    def _frame(self) -> bytes | None:
        if len(self._in) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._in)
        if nbytes > self.frame_max:
            raise ConnectionAbortedError(errno.EMSGSIZE, "the peer sends a frame without an end")
        if len(self._in) < _LENGTH.size + nbytes:
            return None
        del self._in[: _LENGTH.size]
        return self.taken(nbytes)

    def put(self, frame: bytes) -> None:
        """Send a frame, now or with `flush`."""
        self.put_bytes(_LENGTH.pack(len(frame)) + frame)

    def put_bytes(self, data: bytes) -> None:
        self._out += data
        if len(self._out) > UNSENT_MAX:
            raise ConnectionAbortedError(errno.ENOBUFS, "the peer does not read")
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: self.socket.send(self._out)]

    @property
    def must_write(self) -> bool:
        return bool(self._out)

    @property
    def is_quiet(self) -> bool:
        """Whether it is open here and there, and nothing has come unasked."""
        if self.socket.fileno() < 0:  # in a forked child
            return False
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not self._in and not poll.poll(0)

    # -- until a moment --------------------------------------------------------------------

    def receive(self, until: float) -> bytes:
        """The next frame."""
        while (frame := self._frame()) is None:
            self.wait(select.POLLIN, until)
            self.pull()
        return frame

    def fill(self, memory: memoryview, until: float) -> None:
        """Fill `memory` with the next bytes."""
        at = min(len(self._in), len(memory))
        memory[:at] = self.taken(at) or b""
        while at < len(memory):
            try:
                got = self.socket.recv_into(memory[at:])
            except BlockingIOError:
                self.wait(select.POLLIN, until)
                continue
            if not got:
                raise ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
            at += got
            self._check(until)

    def read(self, nbytes: int, until: float) -> bytes:
        """The next bytes."""
        memory = bytearray(nbytes)
        self.fill(memoryview(memory), until)
        return bytes(memory)

    def send(self, frame: bytes, until: float) -> None:
        self.pour(_LENGTH.pack(len(frame)) + frame, until)

    def pour(self, data: bytes | memoryview, until: float) -> None:
        """Send bytes that have no length before them."""
        while self._out:
            self.wait(select.POLLOUT, until)
            self.flush()
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, until)
            self._check(until)

    def send_file(self, descriptor: int, begin: int, end: int, patience_s: float) -> None:
        """Send a range of a file; the other end may pause for `patience_s`."""
        self.socket.settimeout(patience_s)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            if self.socket.sendfile(file, begin, end - begin) < end - begin:
                raise OSError(errno.EIO, "a file ended before the bytes that it should hold")
        self.socket.settimeout(0)

    def wait(self, events: int, until: float) -> None:
        """Return when the socket may be read from, or written to."""
        poll = select.poll()
        poll.register(self.socket, events)
        longest_s = _SLEEP_S if self._revoked is None else _POLL_S
        while not poll.poll(1000 * min(longest_s, self._check(until))):
            pass

    def _check(self, until: float) -> float:
        """How much time is left, in seconds. Raises TimeoutError."""
        if self._revoked is not None and self._revoked.is_set:
            raise TimeoutError(errno.ETIMEDOUT, "nobody waits for it any more")
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "no time is left")
        return left_s

    # -- the end ---------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Wake the threads that wait for this connection, also at the other end: it has ended."""
        with contextlib.suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)  # a forked process may have a copy

    def close(self) -> None:
        self.socket.close()

    def forget(self) -> None:
        self.close()


def connect(
    address: tuple[str, int], door: str, secret: Secret, until: float, revoked: Flag | None = None
) -> Wire:
    """A wire to a door of another process of the job. Raises OSError, and SecretError."""
    ways = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)  # each may lead nowhere
    share_s = max(0.001, (until - time.monotonic()) / len(ways))
    return entered(socket.create_connection(address, share_s), door, secret, until, revoked)


def entered(
    connected: socket.socket, door: str, secret: Secret, until: float, revoked: Flag | None = None
) -> Wire:
    """A wire on a socket that is connected to a door. The socket is closed if that fails."""
    wire = Wire(connected, revoked=revoked)
    try:
        reply, expected = secret.reply(door, wire.read(GREETING_BYTES, until))
        if secret.is_empty:
            check_own(connected)
        wire.pour(reply, until)
        if not is_same(wire.read(PROOF_BYTES, until), expected):
            raise SecretError(errno.EACCES, f"it knows another {ENVIRONMENT}")
    except BaseException:
        wire.close()
        raise
    return wire


def check_own(connected: socket.socket) -> None:
    """Raise PermissionError if a process of another user of this host is at the other end.

    A name in the abstract namespace has no owner, and neither has a port of a loopback address: any
    user of the host may listen there, or call.
    """
    if connected.family == socket.AF_UNIX:
        found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        users = {_CREDENTIALS.unpack(found)[1]}
    elif addresses.is_loopback(connected.getpeername()[0].removeprefix("::ffff:")):
        users = _users_at(connected)
    else:
        return
    if users != {os.geteuid()}:
        raise PermissionError("no process of this user is at the other end of the connection")


def _users_at(connected: socket.socket) -> set[int]:
    """Whose the other end of a connection within this host is, as the kernel lists it."""
    ports = connected.getpeername()[1], connected.getsockname()[1]
    ends = (*(f":{each:04X}" for each in ports), "01")  # it is connected
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{name}") as rows:
            for _, mine, other, state, _, _, _, user, *_ in map(str.split, rows):
                if (mine[-5:], other[-5:], state) == ends:
                    found.add(int(user))
    return found


class Bell:
    """Wakes a thread that selects. A signal handler may ring it."""

    def __init__(self) -> None:
        self.ear, self._rope = socket.socketpair()
        forget_in_children(self)
        for each in (self.ear, self._rope):
            each.setblocking(False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # it has rung often enough, or its thread has ended
            self._rope.send(b"x")

    def heard(self) -> None:
        """Be silent until it rings again."""
        with contextlib.suppress(BlockingIOError):
            while self.ear.recv(_READ):
                pass

    def close(self) -> None:
        self.ear.close()
        self._rope.close()

    def forget(self) -> None:
        self.close()
