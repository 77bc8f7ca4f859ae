"""Server: the process of `statehold coordinate`. One thread brings events to the coordinator.

Invariants:
- It writes nothing to disk. After a restart the ranks tell it what it knew (R12).
- A peer that sends something else than messages, or nothing, loses its connection, and nobody else
  notices.

Lines of a stream of bytes, in both directions, for sockets that do not block.

Invariants: a line comes out once, whole, in order. A peer that sends an endless line, or reads
nothing while LINES_MAX bytes wait for it, is given up with ConnectionError. `line_max` says from
how many bytes on a line is endless.

Not here: decisions (protocol/coordinator).
"""

from __future__ import annotations

import collections
import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterable

from statehold.errors import PortInUseError, UsageError
from statehold.process import addresses
from statehold.process.reception import Reception
from statehold.resilience.protocol.coordinator import Coordinator
from statehold.resilience.protocol.messages import (
    Complaint,
    Fenced,
    Hello,
    Install,
    Leave,
    Message,
    Prepare,
    Refused,
    decode,
    encode,
)

# -- lines -----------------------------------------------------------------------------------------


LINES_MAX = 64 << 20
# Of a peer that has not said who it is.
FIRST_MAX = 1 << 20
_READ = 1 << 16


class Lines:
    """A connected socket that does not block, as lines."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.line_max = LINES_MAX
        self._in = bytearray()
        self._out = bytearray()

    @property
    def must_write(self) -> bool:
        return bool(self._out)

    def read(self) -> list[bytes]:
        """The lines that have come since the last call. ConnectionError: the stream has ended."""
        with contextlib.suppress(BlockingIOError):
            found = self.socket.recv(_READ)
            if not found:
                raise ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
            self._in += found
            if b"\n" in found:
                *lines, self._in = self._in.split(b"\n")
                return [bytes(line) for line in lines]
        if len(self._in) > self.line_max:
            raise ConnectionAbortedError(errno.EMSGSIZE, "the peer sends no end of a line")
        return []

    def write(self, data: bytes) -> None:
        """Send the data, now or with `flush`."""
        self._out += data
        if len(self._out) > LINES_MAX:
            raise ConnectionAbortedError(errno.ENOBUFS, "the peer does not read")
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: self.socket.send(self._out)]

    def close(self) -> None:
        self.socket.close()


# -- the server ------------------------------------------------------------------------------------


TICK_S = 0.02


class Server:
    """Listens, and serves ranks until `stop`.

    once: also stop when the last rank has left, for one job. A rank that is lost has not left.
    host: of the interface to listen on; "" listens on all. port: 0 takes a free one.
    report: called with one line of text for each event that an operator wants to know.
    Raises PortInUseError, and UsageError for an address of another machine.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        host: str,
        port: int,
        report: Callable[[str], None],
        *,
        once: bool = False,
    ) -> None:
        self._once = once
        self._coordinator = coordinator
        self._report = report
        listener = _listen(host, port)
        self.port: int = listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._reception = Reception(self._selector, listener)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lines: dict[int, Lines] = {}
        self._names: dict[int, str] = {}
        self._left: set[int] = set()
        self._unsent: collections.deque[tuple[int, Message]] = collections.deque()
        self._sends = False
        self._told: Message | None = None
        self._next = 0

    def serve(self) -> None:
        """Until `stop`, which may be called by another thread or by a signal handler."""
        ticked = 0.0
        while True:
            for each in self._reception.late():
                self._lose(self._selector.get_key(each).data, TimeoutError("it has said nothing"))
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._wake:
                    return
                if self._reception.owns(key.fileobj):
                    self._accept()
                else:
                    self._ready(key.data)
            now = time.monotonic()
            if now - ticked >= TICK_S:
                ticked = now
                self._send(self._coordinator.tick(now))

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def close(self) -> None:
        """Close all sockets; the ranks go on with their steps, and wait for another coordinator."""
        for lines in self._lines.values():
            lines.close()
        self._reception.close()
        self._selector.close()
        for each in (self._wake, self._waker):
            each.close()

    def _accept(self) -> None:
        connected = self._reception.accept()
        if connected is None:
            return
        self._next += 1
        lines = self._lines[self._next] = Lines(connected)
        lines.line_max = FIRST_MAX
        self._selector.register(connected, selectors.EVENT_READ, self._next)

    def _ready(self, conn: int) -> None:
        lines = self._lines.get(conn)
        if lines is None:
            return
        try:
            lines.flush()
            for line in lines.read():
                self._receive(conn, decode(line))
        except Exception as error:  # whatever its bytes have led to is the end of it alone
            self._lose(conn, error)
        self._watch(conn)

    def _receive(self, conn: int, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, Hello):
            if conn in self._names:
                raise ValueError("a second Hello")
            self._reception.spoke(self._lines[conn].socket)
            self._lines[conn].line_max = LINES_MAX
            self._names[conn] = f"{message.replica} rank {message.place}"
            self._report(f"{self._names[conn]} has connected, at step {message.view.step}")
            self._send(self._coordinator.hello(conn, message, now))
            return
        if conn not in self._names:
            raise ValueError("no Hello")
        if isinstance(message, Leave):
            self._left.add(conn)
            self._report(f"{self._names[conn]} has left, at step {message.view.step}")
        if isinstance(message, Complaint):
            self._report(f"{self._names[conn]} complains: {message.reason}")
        self._send(self._coordinator.receive(conn, message, now))

    def _lose(self, conn: int, error: Exception) -> None:
        lines = self._lines.pop(conn, None)
        if lines is None:
            return
        self._reception.spoke(lines.socket)
        self._selector.unregister(lines.socket)
        lines.close()
        name = self._names.pop(conn, "a stranger")
        if conn not in self._left:
            self._report(f"{name} has gone: {error}")
        elif self._once and not self._names:
            self._report("the job has ended")
            self.stop()
        self._left.discard(conn)
        self._send(self._coordinator.lost(conn, time.monotonic()))

    def _send(self, sent: Iterable[tuple[int, Message]]) -> None:
        """In the order of the coordinator, also if a peer is lost meanwhile."""
        self._unsent.extend(sent)
        if self._sends:
            return
        self._sends = True
        try:
            while self._unsent:
                self._write(*self._unsent.popleft())
        finally:
            self._sends = False

    def _write(self, conn: int, message: Message) -> None:
        lines = self._lines.get(conn)
        if lines is None:
            return
        self._tell(conn, message)
        try:
            lines.write(encode(message))
        except OSError as error:
            self._lose(conn, error)
        self._watch(conn)

    def _watch(self, conn: int) -> None:
        lines = self._lines.get(conn)
        if lines is not None:
            wanted = selectors.EVENT_WRITE if lines.must_write else 0
            self._selector.modify(lines.socket, selectors.EVENT_READ | wanted, conn)

    def _tell(self, conn: int, message: Message) -> None:
        """One line for what goes to many ranks."""
        if isinstance(message, Fenced | Refused):
            facts = message.facts if isinstance(message, Refused) else {}
            details = "".join(f"; {name}: {value}" for name, value in facts.items())
            self._report(f"{self._names.get(conn)} is out: {message.reason}{details}")
        elif message == self._told:
            return
        elif isinstance(message, Install):
            names, count = ", ".join(message.members), len(message.members)
            replicas = f"{count} replica{'s' if count > 1 else ''}"
            self._report(f"epoch {message.epoch} has {replicas}: {names}")
        elif isinstance(message, Prepare):
            self._report(f"epoch {message.epoch} is in preparation")
        self._told = message


def _listen(host: str, port: int) -> socket.socket:
    try:
        return addresses.listen(host, port)
    except OSError as error:
        where = addresses.joined(host or "*", port)
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                "something else listens on the port of the coordinator", facts={"address": where}
            ) from error
        raise UsageError(
            f"the coordinator cannot listen: {error.strerror}", facts={"address": where}
        ) from error
