"""Door: where a holder of the state lets joiners in, and how a joiner comes to it.

    door = Door(host, shared_bytes, connected)    connected(line) is called in a thread of the door
    line = connect(door.address, timeout_s)       from this host, or from another one

A joiner on the same host gets memory that both share, and a Unix socket for what they say. The
kernel then copies no bytes of the state: that costs a third of what TCP costs. Elsewhere, as in a
container with a network of its own, the line is a TCP connection and shares nothing.

Invariants: nothing is left in a directory: the socket's name is in Linux's abstract namespace, and
the memory has none. It is freed when both sides have dropped the line.
Not here: what is said (transfer).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BACKLOG = 128


@dataclass(frozen=True, eq=False)
class Line:
    """A connection. shared: memory of both sides, of bytes; None if they are on two hosts."""

    socket: socket.socket
    shared: Tensor | None = None


class Door:
    """host: the address of this machine for others. shared_bytes: for each line."""

    def __init__(self, host: str, shared_bytes: int, connected: Callable[[Line], None]) -> None:
        self._shared_bytes = shared_bytes
        self._connected = connected
        name = f"statehold-{secrets.token_hex(8)}"
        remote = socket.create_server((host, 0), backlog=_BACKLOG)
        self.address = f"{host}:{remote.getsockname()[1]}/{name}"
        near = socket.socket(socket.AF_UNIX)
        near.bind(f"\0{name}")
        near.listen(_BACKLOG)
        self._listeners = (remote, near)
        for each in self._listeners:
            threading.Thread(
                target=self._accept, args=(each,), name="statehold-door", daemon=True
            ).start()

    def close(self) -> None:
        for each in self._listeners:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError):  # the joiner has gone, or there is no memory
                    self._connected(self._line(connection))

    def _line(self, connection: socket.socket) -> Line:
        if connection.family != socket.AF_UNIX:
            return Line(connection)
        memory = os.memfd_create("statehold-line", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, self._shared_bytes)
            socket.send_fds(connection, [b"m"], [memory])
            return Line(connection, _mapped(memory))
        except OSError:
            connection.close()
            raise
        finally:
            os.close(memory)


def connect(address: str, timeout_s: float) -> Line:
    """A line to a Door. Raises OSError."""
    remote, _, name = address.partition("/")
    with contextlib.suppress(ConnectionRefusedError):  # there is no such name on this host
        return _near(name, timeout_s)
    host, _, port = remote.rpartition(":")
    return Line(socket.create_connection((host, int(port)), timeout_s))


def _near(name: str, timeout_s: float) -> Line:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{name}")
        _, memories, _, _ = socket.recv_fds(connection, 1, 1)
        if not memories:
            raise ConnectionResetError("the holder of the state has gone")
        try:
            return Line(connection, _mapped(memories[0]))
        finally:
            os.close(memories[0])
    except OSError:
        connection.close()
        raise


def _mapped(memory: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=torch.uint8)
