"""An endpoint for Prometheus: `statehold.metrics.serve(9400)`.

This is a function and not an option of the Checkpointer. The figures cover all Checkpointers of the
process. Options are equal on all ranks, but two ranks of a host cannot share a port.

Invariants: one thread serves one request at a time, and drops a client that stalls. Nothing is
printed. A forked child neither serves nor keeps the port. close() frees the port.
Not here: what is counted (counters).
"""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from statehold.errors import PortInUseError, UsageError
from statehold.observe.counters import exposition
from statehold.process.forks import forget_in_children

logger = logging.getLogger("statehold")

# How long a client may take to send its request. Meanwhile no other client is served.
REQUEST_S_MAX = 5.0


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
        facts = {"address": f"{host}:{port}", "cause": str(error)}
        raise kind("cannot serve metrics at this address", facts=facts, hint=hint) from None


class Endpoint:
    """A port that answers. A context manager; close() may be called twice."""

    def __init__(self, host: str, port: int) -> None:
        self._server = _Server(host, port)
        self._is_open = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="statehold-metrics", daemon=True
        )
        self._thread.start()
        forget_in_children(self)

    @property
    def port(self) -> int:
        """The port; the actual one if you passed 0."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving, and free the port."""
        if self._is_open:
            self._is_open = False
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """In a forked child, which has the socket but not the thread."""
        self._is_open = False
        self._server.server_close()


class _Server(HTTPServer):
    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer would ask the resolver for this host's name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "statehold", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S_MAX
    server_version = "statehold"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def _answer(self, is_head: bool) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "look at /metrics")
            return
        body = exposition().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("metrics: " + format, *args)
