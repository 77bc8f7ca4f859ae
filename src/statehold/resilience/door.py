"""Door: where a holder of the state lets joiners in, and how a joiner comes to it.

    door = Door(host, shared_bytes, connected)    connected(line) is called in a thread of the door
    line = connect(door.address, timeout_s, revoked)    from this host, or from another one

A joiner on the same host gets memory that both share, and a Unix socket for what they say. The
kernel then copies no bytes of the state: that costs a third of what TCP costs. Elsewhere, as in a
container with a network of its own, the line is a TCP connection and shares nothing. If the holder
gets no memory, the line is the Unix socket alone.

Invariants: only who runs as the same user comes through the Unix socket, and a joiner takes nothing
there from anybody else. Nothing is left in a directory: the socket's name is in Linux's abstract
namespace, and the memory has none. It is freed when both sides have dropped the line.
Not here: what both sides say (transfer).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from statehold.process import addresses
from statehold.process.reception import check_own

_BACKLOG = 128
_SHARES, _SHARES_NOTHING = b"m", b"-"
_POLL_S = 0.01
# Between two attempts to let somebody in when this process has no descriptor left.
_AGAIN_S = 0.1


@dataclass(frozen=True, eq=False)
class DoorLine:
    """A connection. shared: memory of both sides, of bytes; None if they share none."""

    socket: socket.socket
    shared: Tensor | None = None


class Door:
    """host: the address of this machine for others. shared_bytes: for each line."""

    def __init__(self, host: str, shared_bytes: int, connected: Callable[[DoorLine], None]) -> None:
        self._shared_bytes = shared_bytes
        self._connected = connected
        self._closed = threading.Event()
        name = f"statehold-{secrets.token_hex(8)}"
        remote = addresses.listen(host)
        self.address = f"{addresses.joined(host, remote.getsockname()[1])}/{name}"
        near = socket.socket(socket.AF_UNIX)
        near.bind(f"\0{name}")
        near.listen(_BACKLOG)
        self._listeners = (remote, near)
        for each in self._listeners:
            threading.Thread(
                target=self._accept, args=(each,), name="statehold-door", daemon=True
            ).start()

    def close(self) -> None:
        self._closed.set()
        for each in self._listeners:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or there is no descriptor just now
                self._closed.wait(_AGAIN_S)
                continue
            with contextlib.suppress(OSError):  # the joiner has gone
                self._connected(self._line(connection))

    def _line(self, connection: socket.socket) -> DoorLine:
        if connection.family != socket.AF_UNIX:
            return DoorLine(connection)
        try:
            check_own(connection)
            with contextlib.suppress(OSError):  # there is no memory, or no descriptor
                return self._sharing(connection)
            connection.sendall(_SHARES_NOTHING)
        except OSError:
            connection.close()
            raise
        return DoorLine(connection)

    def _sharing(self, connection: socket.socket) -> DoorLine:
        memory = os.memfd_create("statehold-line", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, self._shared_bytes)
            shared = _mapped(memory)
            socket.send_fds(connection, [_SHARES], [memory])
        finally:
            os.close(memory)
        return DoorLine(connection, shared)


def connect(address: str, timeout_s: float, revoked: threading.Event) -> DoorLine:
    """A line to a Door. Raises OSError, also if `revoked` is set meanwhile."""
    remote, _, name = address.partition("/")
    # There is no such name on this host, or this process may not use it.
    with contextlib.suppress(ConnectionRefusedError, PermissionError):
        return _near(name, timeout_s, revoked)
    return DoorLine(socket.create_connection(addresses.split(remote), timeout_s))


def _near(name: str, timeout_s: float, revoked: threading.Event) -> DoorLine:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_POLL_S)
        connection.connect(f"\0{name}")
        check_own(connection)
        return DoorLine(connection, _shared(connection, timeout_s, revoked))
    except OSError:
        connection.close()
        raise


def _shared(connection: socket.socket, timeout_s: float, revoked: threading.Event) -> Tensor | None:
    """The memory that the holder sends. A holder that stands still sends nothing."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            said, memories, _, _ = socket.recv_fds(connection, 1, 1)
        except TimeoutError:
            if revoked.is_set() or time.monotonic() > deadline:
                raise
            continue
        if said == _SHARES_NOTHING:
            return None
        if not memories:
            raise ConnectionResetError("the holder of the state has gone")
        try:
            return _mapped(memories[0])
        finally:
            os.close(memories[0])


def _mapped(memory: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=torch.uint8)
