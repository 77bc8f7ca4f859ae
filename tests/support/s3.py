"""A server that speaks S3, in a process of its own, and a proxy before it that interferes.

The server (moto) prints its port and ends when its standard input does, so also when the tests are
killed. The proxy opens a connection for every request; what is to happen to one is decided by a
function of (method, target), and every fault that fired is counted by its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator

# Listings come in pages of seven, so every listing of more than that needs several requests.
_SERVER = """
import sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
BUSY = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Length: 37\r\nConnection: close\r\n\r\n"
    b"<Error><Code>SlowDown</Code></Error>\n"
)
DENIED = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Length: 41\r\nConnection: close\r\n\r\n"
    b"<Error><Code>AccessDenied</Code></Error>\n"
)
SKEWED = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Length: 49\r\nConnection: close\r\n\r\n"
    b"<Error><Code>RequestTimeTooSkewed</Code></Error>\n"
)
ENDED = (
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 41\r\nConnection: close\r\n\r\n"
    b"<Error><Code>NoSuchUpload</Code></Error>\n"
)
REFUSALS = {"busy": BUSY, "denied": DENIED, "skewed": SKEWED, "ended": ENDED}
Fault = Callable[[str, str], "str | None"]


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors"))


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Run a server; its port."""
    environment = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "7"}
    environment |= {"AWS_ACCESS_KEY_ID": "server", "AWS_SECRET_ACCESS_KEY": "server"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()
            server.wait(60)


def request(port: int, method: str, target: str) -> bytes:
    """What the server answers to a bare request."""
    url = f"http://127.0.0.1:{port}{target}"
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
        return bytes(answer.read())


class Proxy:
    """Stands before the server at `upstream`. `fault` may be set at any time; it returns:

    "drop": the connection ends without an answer; "reset": it is reset; "lose": the request is
    carried out, its answer is lost; "busy", "denied", "skewed": 503, 403, 403 because of the clock;
    "ended": 404, as stores say of an upload that was put together before;
    "truncate": half of the answer's body; "cut": the connection ends in the middle of the request's
    body; "stall": no answer, until the proxy is closed; "whole": the whole object, whatever range
    is asked for.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self.port: int = self._socket.getsockname()[1]
        self.fault: Fault = lambda method, target: None
        self.fired: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head, begun = _read_head(connection)
            if not head:
                return
            method, target = head.split(b" ", 2)[:2]
            with self._guard:
                self.requests.append((method.decode(), target.decode()))
                fault = self.fault(method.decode(), target.decode())
                if fault:
                    self.fired[fault] += 1
            length = _content_length(head)
            if fault == "cut":
                _read(connection, begun, length // 2)
                return
            body = _read(connection, begun, length)
            if fault == "stall":
                self._closed.wait()
            elif fault == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif fault in REFUSALS:
                connection.sendall(REFUSALS[fault])
            elif fault != "drop":
                self._relay(connection, head, body, fault)

    def _relay(
        self, connection: socket.socket, head: bytes, body: bytes, fault: str | None
    ) -> None:
        if fault == "whole":
            lines = head.split(b"\r\n")
            head = b"\r\n".join(each for each in lines if not each.lower().startswith(b"range:"))
        answer = self._ask(head, body)
        if fault == "lose":
            return
        if fault == "truncate":
            begin = answer.index(b"\r\n\r\n") + 4
            answer = answer[: begin + (len(answer) - begin) // 2]
        connection.sendall(answer)

    def _ask(self, head: bytes, body: bytes) -> bytes:
        lines = [
            line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
        ]
        lines.insert(1, b"Connection: close")
        with socket.create_connection(("127.0.0.1", self._upstream)) as server:
            server.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            return b"".join(iter(lambda: server.recv(1 << 20), b""))


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head of a request, and what has already come of its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1 << 16)
        if not more:
            return b"", b""
        data += more
    head, _, begun = data.partition(b"\r\n\r\n")
    return head, begun


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _read(connection: socket.socket, begun: bytes, length: int) -> bytes:
    data = bytearray(begun)
    while len(data) < length:
        more = connection.recv(1 << 20)
        if not more:
            raise ConnectionError("the client went away")
        data += more
    return bytes(data)
