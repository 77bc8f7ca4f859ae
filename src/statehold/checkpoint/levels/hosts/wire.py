"""One connection that speaks the part of HTTP/1.1 that reading files needs; both ends use it.

Owns: heads (first line and fields), bodies of a known length, and the time for all of it.
Invariants: whatever the other end sends or does not send, a call ends by its moment `until`, with
TimeoutError, EOFError (it hung up), WireError (an unknown message) or OSError. A head has at most
HEAD_BYTES_MAX, however it arrives. http.client and http.server count their time from the last byte
that arrived, so a client that sends one byte a minute holds them for hours.
Not here: who may ask, and for what (serving), the names of failures (remote).
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

HEAD_BYTES_MAX = 8 << 10
_END = b"\r\n\r\n"
_FIELD = re.compile(r"([A-Za-z0-9-]{1,64}):([\t\x20-\x7e]*)")
_FIRST = re.compile(r"[\x21-\x7e][\x20-\x7e]*")
_LENGTH = re.compile(r"[0-9]{1,18}")


class WireError(Exception):
    """An unknown message arrived."""


@dataclass(frozen=True, slots=True)
class MessageHead:
    """The first line of a message, in words, and its fields, named in lower case."""

    words: tuple[str, ...]
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def body_bytes(self) -> int:
        """The length of the body that follows. Raises WireError if it is not given."""
        length = self.fields.get("content-length", "0")
        if "transfer-encoding" in self.fields or _LENGTH.fullmatch(length) is None:
            raise WireError("a body without a length")
        return int(length)

    def encode(self) -> bytes:
        lines = [" ".join(self.words), *(f"{name}: {text}" for name, text in self.fields.items())]
        return "\r\n".join(lines).encode("ascii") + _END


class Wire:
    """A connected socket, which it owns; moments are of time.monotonic().

    Not thread-safe, except for hang_up().
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._ahead = b""  # of the next message
        with contextlib.suppress(OSError):  # it has ended already
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def head(self, until: float) -> MessageHead:
        """The next head. EOFError if the connection ends before, or in, one."""
        while (end := self._ahead.find(_END)) < 0:
            if len(self._ahead) > HEAD_BYTES_MAX:
                raise WireError("a head without an end")
            self._wait(until)
            more = self._socket.recv(HEAD_BYTES_MAX)
            if not more:
                raise EOFError("the other end hung up")
            self._ahead += more
        raw, self._ahead = self._ahead[:end], self._ahead[end + len(_END) :]
        return _parsed(raw)

    def read_into(self, memory: memoryview, until: float) -> None:
        """Fill `memory` with the next bytes."""
        at = min(len(self._ahead), len(memory))
        memory[:at] = self._ahead[:at]
        self._ahead = self._ahead[at:]
        while at < len(memory):
            self._wait(until)
            got = self._socket.recv_into(memory[at:])
            if not got:
                raise EOFError("the other end hung up in the middle of a body")
            at += got

    def send(self, data: bytes, until: float) -> None:
        self._wait(until)
        self._socket.sendall(data)

    def send_file(self, descriptor: int, begin: int, end: int, patience_s: float) -> None:
        """Send a range of a file; the other end may pause for `patience_s`."""
        self._socket.settimeout(patience_s)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            if self._socket.sendfile(file, begin, end - begin) < end - begin:
                raise EOFError("a file ended before the bytes that it should hold")

    @property
    def is_quiet(self) -> bool:
        """Whether the other end has neither hung up nor sent anything unasked."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not self._ahead and not poll.poll(0)

    def hang_up(self) -> None:
        """Wake the threads that wait for this connection: for them, it has ended."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _wait(self, until: float) -> None:
        """The next call of the socket ends by `until`."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time is left")
        self._socket.settimeout(left)


def _parsed(raw: bytes) -> MessageHead:
    first, *lines = raw.decode("latin-1").split("\r\n")
    if _FIRST.fullmatch(first) is None:
        raise WireError("no first line")
    fields: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None or match[1].lower() in fields:
            raise WireError("no field of a head")
        fields[match[1].lower()] = match[2].strip()
    return MessageHead(tuple(first.split(" ", 2)), fields)
