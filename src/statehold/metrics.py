"""An endpoint for Prometheus: `statehold.metrics.serve(9400)`.

This is a function and not an option of the Checkpointer. The figures cover all Checkpointers of the
process. Options are equal on all ranks, but two ranks of a host cannot share a port.

Invariants: one thread answers one request at a time, and reads any number of them meanwhile. A
client that has not sent all of its request, or not taken the answer, after FIRST_S is dropped.
Nothing is printed. A forked child neither serves nor keeps the port. close() frees the port, and
waits for no client.
"""

from __future__ import annotations

import re

from statehold.net import addresses
from statehold.net.reception import Guest, Reception
from statehold.observe.counters import exposition
from statehold.options.keywords import check_number

__all__ = ["Endpoint", "serve"]

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
    check_number("port", port, 0, 65535)
    return Endpoint(host, port)


class Endpoint:
    """A port that answers. A context manager; close() may be called twice."""

    def __init__(self, host: str, port: int) -> None:
        hint = "pass an address of this host, and a port of its own to each of its ranks"
        listener = addresses.listener("the metrics", host, port, hint)
        self._port = int(listener.getsockname()[1])
        self._reception = Reception([listener], "metrics", None)
        self._reception.start("statehold-metrics", self._hear)

    @property
    def port(self) -> int:
        """The port; the actual one if you passed 0."""
        return self._port

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._reception.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, client: Guest, more: bytes) -> None:
        client.data = (client.data or b"") + more
        if _END.search(client.data):
            self._reception.finish(client, _answer(client.data))
        elif len(client.data) > REQUEST_BYTES_MAX:
            raise ValueError("a request without an end")


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
