"""An endpoint for Prometheus: `statehold.metrics.serve(9400)`.

This is a function and not an option of the Checkpointer. The figures cover all Checkpointers of the
process. Options are equal on all ranks, but two ranks of a host cannot share a port.

Invariants: one thread answers one request at a time, and reads any number of them meanwhile. A
client that has not sent all of its request, or not taken the answer, after FIRST_S is dropped.
Nothing is printed. A forked child neither serves nor keeps the port. close() frees the port, and
waits for no client.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import selectors
import socket
import threading

from statehold.errors import PortInUseError, UsageError
from statehold.observe.counters import exposition
from statehold.process import addresses
from statehold.process.forks import forget_in_children
from statehold.process.reception import FIRST_S, Reception

__all__ = ["Endpoint", "serve"]


logger = logging.getLogger("statehold")

REQUEST_BYTES_MAX = 16 << 10
_END = re.compile(rb"\r?\n\r?\n")
_REQUEST = re.compile(rb"([A-Z]+) ([^ ]+) HTTP/1\.[01]\r?\n")


def serve(port: int, host: str = "127.0.0.1") -> Endpoint:
    """Serve the figures of this process at http://HOST:PORT/metrics until close().

    There is no password: pass another address than 127.0.0.1 only if everybody may read paths of
    runs.

    Args:
        port: 0 takes a free port. Several ranks of a host need one port each: `9400 + local_rank`.
        host: the address to listen on.

    Raises:
        PortInUseError: another process has the port.
        UsageError: the port is not valid, or the address is that of another machine.
    """
    if type(port) is not int or not 0 <= port <= 65535:
        raise UsageError("port must be 0 to 65535", facts={"got": repr(port)})
    try:
        return Endpoint(host, port)
    except OSError as error:
        kind = PortInUseError if error.errno == errno.EADDRINUSE else UsageError
        hint = "give each rank of a host its own port" if kind is PortInUseError else None
        facts = {"address": addresses.joined(host, port), "cause": str(error)}
        raise kind("cannot serve metrics at this address", facts=facts, hint=hint) from None


class Endpoint:
    """A port that answers. A context manager; close() may be called twice."""

    def __init__(self, host: str, port: int) -> None:
        listener = addresses.listen(host, port)
        self._port = int(listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._reception = Reception(self._selector, listener)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._clients: dict[socket.socket, bytearray] = {}
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="statehold-metrics", daemon=True)
        self._thread.start()
        forget_in_children(self)

    @property
    def port(self) -> int:
        """The port; the actual one if you passed 0."""
        return self._port

    def close(self) -> None:
        """Stop serving, and free the port."""
        if self._is_open:
            self._is_open = False
            self._waker.send(b"x")
            for each in list(self._clients):  # one may be taking its answer
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self.forget()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Close all sockets. A forked child has them, but not the thread."""
        self._is_open = False
        for each in (*self._clients, self._wake, self._waker):
            each.close()
        self._reception.close()
        self._selector.close()

    # The thread

    def _serve(self) -> None:
        while self._is_open:
            for each in self._reception.late():
                self._drop(each)
            for key, _ in self._selector.select(self._reception.turn_s):
                if self._reception.owns(key.fileobj):
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)

    def _accept(self) -> None:
        if client := self._reception.accept():
            client.settimeout(FIRST_S)
            self._clients[client] = bytearray()
            self._selector.register(client, selectors.EVENT_READ, client)

    def _read(self, client: socket.socket) -> None:
        asked = self._clients[client]
        try:
            found = client.recv(REQUEST_BYTES_MAX)
            asked += found
            if found and len(asked) <= REQUEST_BYTES_MAX and not _END.search(asked):
                return
            if found:
                client.sendall(_answer(bytes(asked)))
        except Exception:  # whatever it is, the other clients get their answers
            logger.debug("a request for metrics failed", exc_info=True)
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._reception.spoke(client)
        self._selector.unregister(client)
        del self._clients[client]
        client.close()


def _answer(request: bytes) -> bytes:
    match = _REQUEST.match(request)
    if match is None:
        return _message("400 Bad Request", "not a request\n")
    if match[1] not in (b"GET", b"HEAD"):
        return _message("501 Not Implemented", "use GET\n")
    if match[2].partition(b"?")[0] != b"/metrics":
        return _message("404 Not Found", "look at /metrics\n")
    return _message("200 OK", exposition(), is_head=match[1] == b"HEAD")


def _message(status: str, text: str, *, is_head: bool = False) -> bytes:
    body = text.encode()
    kind = "text/plain; version=0.0.4; charset=utf-8"
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}")
    head = "\r\n".join((*lines, "Connection: close", "", "")).encode()
    return head if is_head else head + body
