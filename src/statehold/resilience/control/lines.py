"""Lines of a stream of bytes, in both directions, for sockets that do not block.

Invariants: a line comes out once, whole, in order. A peer that sends an endless line, or reads
nothing while LINES_MAX bytes wait for it, is given up with ConnectionError. `line_max` says from
how many bytes on a line is endless.
Not here: what is in a line (protocol/messages).
"""

from __future__ import annotations

import contextlib
import errno
import socket

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
