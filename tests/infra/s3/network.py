"""A network before a server: the proxy of tests/objects, with more that may happen on the way."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from infra.s3.servers import Server
from support.s3 import Proxy

N = TypeVar("N", bound="Network")
BYTES_PER_S = 2_000_000


class Network(Proxy):
    """`fault` may also return:

    "slow": the request takes as long as at BYTES_PER_S; "hole": no answer until the network heals,
    and then the connection ends.
    """

    def __init__(self, upstream: int) -> None:
        super().__init__(upstream)
        self._healed = threading.Event()
        self.answers: Counter[int] = Counter()

    def heal(self) -> None:
        """From now on nothing happens on the way; requests that wait in a hole are lost."""
        self.fault = lambda method, target: None
        self._healed.set()

    def close(self) -> None:
        self._healed.set()
        super().close()

    def _relay(
        self, connection: socket.socket, head: bytes, body: bytes, fault: str | None
    ) -> None:
        if fault == "hole":
            self._healed.wait()
            return
        if fault == "slow":
            self._closed.wait(len(body) / BYTES_PER_S)
        super()._relay(connection, head, body, fault)

    def _ask(self, head: bytes, body: bytes) -> bytes:
        answer = super()._ask(head, body)
        with self._guard:
            self.answers[int(answer.split(b" ", 2)[1])] += 1
        return answer


@contextmanager
def before(server: Server, kind: type[N] = Network) -> Iterator[N]:
    """A network before a server."""
    network = kind(server.port)
    try:
        yield network
    finally:
        network.close()
