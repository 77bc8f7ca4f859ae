"""Meetings: the ranks of a group tell each other how to reach them, at the desk of one of them.

Every rank has a Desk. A rank sends one line to the desk where its epoch meets, and the answer has
what every rank of its group has said. A TCPStore of torch would do, but each of its connections
looks a name up at both ends. On a machine whose name server loses a packet, everybody waits for
five seconds, because a TCPStore has one thread.

Invariants: a rank that goes away before its group is complete leaves nothing behind. Who comes and
says something else, or nothing, loses its connection, and nobody else notices. No name is looked
up, as long as addresses are numbers.
Not here: what the ranks say (gloo), which desk an epoch meets at (protocol).
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from dataclasses import dataclass

from statehold.encoding import strictjson
from statehold.process import addresses
from statehold.process.reception import Reception
from statehold.resilience.lost import GroupLostError

# For a connection, and for a rank to take an answer.
CONNECT_S = 5.0
_POLL_S = 0.01
_LINE_MAX = 1 << 16
_RANKS_MAX = 1 << 20


def meet(
    desk: str, group: str, rank: int, size: int, says: str, revoked: threading.Event
) -> list[str]:
    """What the ranks of a group say, by rank. Raises GroupLostError."""
    line = json.dumps([group, rank, size, says]).encode() + b"\n"
    answer = bytearray()
    try:
        with socket.create_connection(addresses.split(desk), CONNECT_S) as connection:
            connection.sendall(line)
            connection.settimeout(_POLL_S)
            while not answer.endswith(b"\n"):
                if revoked.is_set():
                    raise GroupLostError("the epoch has ended while its ranks met")
                with contextlib.suppress(TimeoutError):
                    found = connection.recv(_LINE_MAX)
                    if not found:
                        raise GroupLostError(f"the rank with the desk {desk} has gone")
                    answer += found
                    if len(answer) > size * _LINE_MAX:
                        raise ValueError("an answer without an end")
        return _sayings(strictjson.message(bytes(answer)), size)
    except (OSError, ValueError) as error:
        raise GroupLostError(f"the desk {desk} does not answer: {error}") from error


def _sayings(answer: object, size: int) -> list[str]:
    if type(answer) is not list or [type(each) for each in answer] != [str] * size:
        raise ValueError("not what the ranks of a group say")
    return answer


def _row(line: bytes) -> tuple[str, int, int, str]:
    """What a visitor says: its group, its rank, how many ranks the group has, and to them."""
    said = strictjson.message(line)
    if type(said) is not list or [type(each) for each in said] != [str, int, int, str]:
        raise ValueError("not a line of a meeting")
    group, rank, size, says = said
    if not 0 <= rank < size <= _RANKS_MAX:
        raise ValueError("no rank of a group")
    return group, rank, size, says


@dataclass(slots=True)
class _Visitor:
    connection: socket.socket
    line: bytes = b""
    group: str = ""
    rank: int = 0
    says: str = ""


class Desk:
    """A place where groups meet, served by a thread. host: an address that others can reach."""

    def __init__(self, host: str) -> None:
        listener = addresses.listen(host)
        self.address = addresses.joined(host, listener.getsockname()[1])
        self._waiting: dict[str, dict[int, _Visitor]] = {}
        self._selector = selectors.DefaultSelector()
        self._reception = Reception(self._selector, listener)
        self._bell, self._door = socket.socketpair()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="statehold-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self._bell.send(b"x")  # its end would not arrive while a forked child has a copy of it
        self._thread.join()
        self._bell.close()

    def _serve(self) -> None:
        while True:
            for each in self._reception.late():
                self._forget(self._selector.get_key(each).data)
            for key, _ in self._selector.select(self._reception.turn_s):
                if key.fileobj is self._door:
                    self._end()
                    return
                if self._reception.owns(key.fileobj):
                    self._accept()
                else:
                    self._read(key.data)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                with contextlib.suppress(OSError):  # a forked child may have a copy of it
                    key.fileobj.shutdown(socket.SHUT_RDWR)
                key.fileobj.close()
        self._reception.close()
        self._selector.close()

    def _accept(self) -> None:
        if connection := self._reception.accept():
            connection.settimeout(CONNECT_S)
            self._selector.register(connection, selectors.EVENT_READ, _Visitor(connection))

    def _read(self, visitor: _Visitor) -> None:
        try:
            found = visitor.connection.recv(_LINE_MAX)
            visitor.line += found
            if not found or visitor.group or len(visitor.line) > _LINE_MAX:
                self._forget(visitor)
            elif visitor.line.endswith(b"\n"):
                visitor.group, visitor.rank, size, visitor.says = _row(visitor.line)
                self._reception.spoke(visitor.connection)
                self._join(visitor, size)
        except (OSError, ValueError):
            self._forget(visitor)

    def _join(self, visitor: _Visitor, size: int) -> None:
        present = self._waiting.setdefault(visitor.group, {})
        present[visitor.rank] = visitor
        if len(present) < size:
            return
        answer = json.dumps([present[rank].says for rank in sorted(present)]).encode() + b"\n"
        for each in list(present.values()):
            with contextlib.suppress(OSError):  # its group will miss it
                each.connection.sendall(answer)
            self._forget(each)

    def _forget(self, visitor: _Visitor) -> None:
        if visitor.connection.fileno() < 0:
            return
        self._reception.spoke(visitor.connection)
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        present = self._waiting.get(visitor.group, {})
        if present.get(visitor.rank) is visitor:
            del present[visitor.rank]
            if not present:
                del self._waiting[visitor.group]
