"""Gloo groups that can be given up: their building and their operations end when a caller says so.

Gloo cannot interrupt an operation: it ends when a connection breaks, or after its timeout. So a
group knows the addresses that its ranks listen on, and `hang_up` shuts down every connection of
this process from or to one of them. All operations of the group then fail within milliseconds, here
and at the peers, also if a forked process has copies of the sockets.

Invariants: `hang_up` touches connections of this group only, and no listening socket: gloo ends
the process when one of these breaks. No name is looked up: addresses are numbers.
Not here: which groups a membership has (groups), where ranks meet (meeting).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store

from statehold.resilience.protocol.actions import GroupLostError

# The longest time for ranks that have met to connect. An abandoned building lives no longer.
CONNECT_S = 5.0
# Operations wait for the slowest rank. Leases find the dead ones, so this is as good as for ever.
OPERATION = timedelta(days=1)

_ATTEMPTS = 5
_INTERFACE = "GLOO_SOCKET_IFNAME"

Address = tuple[str, int]
# Gives what this rank says to the others, and returns what all have said, by rank.
Meeting = Callable[[str], list[str]]

_finding = threading.Lock()


class Line:
    """What the gloo groups of one membership have in common: a listening socket and a thread.

    host: the address of this machine that others can reach. GLOO_SOCKET_IFNAME comes first.
    """

    def __init__(self, host: str) -> None:
        self.addresses: set[Address] = set()
        with _finding:
            self.device, self.own = _device_and_address(host)
        self.addresses.add(self.own)

    def hang_up(self) -> None:
        """Break all connections of the groups. Any thread may do so, at any time."""
        for each in _sockets():
            with contextlib.suppress(OSError):  # not connected yet, or not any more
                if not _listens(each) and (
                    each.getsockname()[:2] == self.own or each.getpeername()[:2] in self.addresses
                ):
                    each.shutdown(socket.SHUT_RDWR)


class _Names(Store):
    """What gloo's constructor takes for a store: the first `set` meets the other ranks."""

    def __init__(self, meeting: Meeting, line: Line) -> None:
        super().__init__()
        self._meeting = meeting
        self._line = line
        self._found: list[bytes] = []

    def set(self, key: str, value: Any) -> None:
        host, port = self._line.own
        for each in self._meeting(json.dumps([host, port, bytes(value).hex()])):
            host, port, blob = json.loads(each)
            self._line.addresses.add((host, port))
            self._found.append(bytes.fromhex(blob))

    def get(self, key: str) -> bytes:
        return self._found[int(key.rpartition("/")[2])]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Everybody has met."""


def build(meeting: Meeting, line: Line, rank: int, size: int) -> Any:
    """A group of `size` ranks. Raises RuntimeError when a rank does not come or connect."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [line.device]
    options._threads = 1
    options._timeout = timedelta(seconds=CONNECT_S)
    group: Any = ProcessGroupGloo(_Names(meeting, line), rank, size, options)
    group.set_timeout(OPERATION)
    return group


def _device_and_address(host: str) -> tuple[Any, Address]:
    """A device of gloo does not tell its address: its socket is the one that is new."""
    for _ in range(_ATTEMPTS):
        before = set(_listening())
        device = _device(host)
        found = set(_listening()) - before
        if len(found) == 1:  # otherwise another thread has begun to listen at the same time
            return device, found.pop()
    raise GroupLostError(f"gloo listens on one of {sorted(found)}, and it is unknown which")


def _device(host: str) -> Any:
    """Connections are made at once: the first operation could not be given up otherwise."""
    interface = os.environ.get(_INTERFACE, "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return ProcessGroupGloo.create_device(hostname=host, lazy_init=False)


def _sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, through descriptors of their own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    yield each


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening() -> Iterator[Address]:
    for each in _sockets():
        with contextlib.suppress(OSError):
            if _listens(each):
                yield each.getsockname()[:2]
