"""Reception: who comes to a listener of a thread that selects, until it has said what it wants.

    reception = Reception(selector, listener)
    connected = reception.accept()      the listener is readable; None: not now
    reception.spoke(connected)          it has said what it wants
    late = reception.late()             each turn: hang up on those; select for `turn_s` at most

Invariants: who says nothing is hung up on after FIRST_S, and after ROOM_S while many are silent.
At most SILENT_MAX are silent, and some descriptors of the process stay free for others. A listener
that can let nobody in rests for a moment, so that its thread does not spin.
Not here: the content of what they say.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import struct
import time

FIRST_S = 5.0
ROOM_S = 0.25
SILENT_MAX = 128
_SPARE = 64
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class Reception:
    """Owns the listener, and registers it."""

    def __init__(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        self._selector = selector
        self._listener = listener
        self._silent: dict[socket.socket, float] = {}
        self._rests_until: float | None = None
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def owns(self, registered: object) -> bool:
        """Whether this is the listener."""
        return registered is self._listener

    def accept(self) -> socket.socket | None:
        now = time.monotonic()
        if len(self._silent) < SILENT_MAX and len(self._selector.get_map()) < _most():
            try:
                connected, _ = self._listener.accept()
            except BlockingIOError:  # it has gone already
                return None
            except OSError:  # there is no descriptor just now
                pass
            else:
                self._silent[connected] = now
                return connected
        self._selector.unregister(self._listener)
        self._rests_until = now + ROOM_S
        return None

    def spoke(self, connected: socket.socket) -> None:
        self._silent.pop(connected, None)

    def late(self) -> list[socket.socket]:
        now = time.monotonic()
        if self._rests_until is not None and now >= self._rests_until:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        patience_s = FIRST_S if len(self._silent) < SILENT_MAX // 2 else ROOM_S
        return [each for each, since in self._silent.items() if now - since > patience_s]

    @property
    def turn_s(self) -> float | None:
        """None: until something comes."""
        return ROOM_S if self._silent or self._rests_until is not None else None

    def close(self) -> None:
        self._listener.close()


def _most() -> int:
    """How many descriptors a selector may have of those that this process may open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if most == resource.RLIM_INFINITY else most - min(_SPARE, most // 4)


def check_own(connected: socket.socket) -> None:
    """Raise PermissionError if a process of another user is at the other end of a Unix socket.

    A name in the abstract namespace has no owner: any user of the host may listen there, or call.
    """
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"user {user} is at the other end of a socket of this user")
