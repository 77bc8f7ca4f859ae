"""Reception: the listeners and the guests of one thread that selects, and who is let in.

    reception = Reception(listeners, "desk", secret)
    reception.start("statehold-desk", hear, lost)      or serve(hear, lost, tick), in this thread
    reception.put(guest, frame)                        inside `hear`
    reception.lend(guest), reception.returned(guest)   a thread has the wire in between
    reception.close()

`hear(guest, frame)` gets the frames of guests that have proven that they know the secret; without a
secret, as for HTTP, whatever bytes come. `lost(guest, error)` hears of each guest that has gone.

Invariants: a guest can end nothing but its own connection: whatever its bytes lead to is caught
here. A guest that says nothing, or does not take its last answer, is hung up on after FIRST_S, and
after ROOM_S while many are silent. At most SILENT_MAX are silent, and some descriptors of the
process stay free for others. Of more than `most` guests, the one that has been idle for longest
goes. A listener that can let nobody in rests for a moment, so that its thread does not spin.
Through a Unix socket comes only who runs as the same user. A forked child keeps nothing of this.
Not here: what a frame means.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from statehold.net import addresses
from statehold.net.secret import ENVIRONMENT, MAGIC, PROOF_BYTES, REPLY_BYTES, Secret, new_nonce
from statehold.net.wire import FRAME_MAX, Bell, Wire, check_own
from statehold.process.forks import forget_in_children
from statehold.process.warn import logger
from statehold.process.worker import Thread

FIRST_S = 5.0
ROOM_S = 0.25
SILENT_MAX = 128
_SPARE = 64
_warned: list[str] = []


class Guest:
    """Who has connected. number: of the connection, from 1 on. data: of the one who hears it."""

    def __init__(self, wire: Wire, number: int, nonce: bytes) -> None:
        self.wire = wire
        self.number = number
        self.data: Any = None
        self.nonce = nonce  # b"" once it is let in
        self.is_told = False  # that it goes when it has taken everything


Hear = Callable[[Guest, bytes], None]
Lost = Callable[[Guest, Exception], None]


class Reception:
    """It owns the listeners. door: what guests come for. most: how many may be there.

    rests_until: until when it lets nobody in, for want of descriptors; None if it does.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        door: str,
        secret: Secret | None,
        *,
        frame_max: int = FRAME_MAX,
        most: int | None = None,
    ) -> None:
        self._listeners = listeners
        self._door = door
        self._secret = secret
        self._frame_max = frame_max
        self._most = most
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._guests: dict[Guest, float] = {}  # since when each is idle, the longest first
        self._silent: dict[Guest, float] = {}
        self._lent: set[Guest] = set()
        self._back: deque[Guest] = deque()
        self._count = 0
        self.rests_until: float | None = None
        self._was_full = False  # when somebody came last
        self._lost: Lost = lambda guest, error: None
        self._is_over = False
        self._thread: Thread | None = None
        for each in listeners:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._selector.register(self._bell.ear, selectors.EVENT_READ)
        self._lets_all_in = secret is not None and secret.is_empty
        if self._lets_all_in:
            _warn_of_networks(listeners)
        forget_in_children(self)

    def start(self, name: str, hear: Hear, lost: Lost | None = None) -> None:
        """Serve in a thread of that name."""
        self._thread = Thread(self.serve, name, hear, lost)
        self._thread.start()

    def serve(
        self,
        hear: Hear,
        lost: Lost | None = None,
        tick: Callable[[], None] = lambda: None,
        tick_s: float | None = None,
    ) -> None:
        """Until stop(). tick: called after each turn, and at least every `tick_s`."""
        self._lost = lost or self._lost
        while not self._is_over:
            for guest in self._late():
                self.drop(guest, TimeoutError("it has said nothing"))
            for key, _ in self._selector.select(self._patience_s(tick_s)):
                if key.fileobj is self._bell.ear:
                    self._bell.heard()
                elif key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._attend(key.data, hear)
            while self._back:
                self._take_back(self._back.popleft(), hear)
            tick()

    def stop(self) -> None:
        """End serve(). Any thread, and a signal handler, may call it."""
        self._is_over = True
        self._bell.ring()

    def close(self) -> None:
        """Hang up on all guests, and free the ports. It may be called twice."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        self.hang_up()
        for each in (*self._guests, *self._back):
            each.wire.hang_up()
            each.wire.close()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # a forked process may have a copy
        self._bell.close()
        self._close_own()

    def forget(self) -> None:
        """In a forked child: it has the sockets, but not the thread. Wires forget by themselves."""
        self._is_over = True
        self._close_own()

    def _close_own(self) -> None:
        for each in self._listeners:
            each.close()
        self._selector.close()

    # -- guests ----------------------------------------------------------------------------

    def put(self, guest: Guest, frame: bytes) -> None:
        """Send a frame, now or as soon as the guest reads. Raises OSError."""
        guest.wire.put(frame)
        self._watch(guest)

    def finish(self, guest: Guest, last: bytes) -> None:
        """Send this, and hang up when the guest has it. Raises OSError."""
        guest.is_told = True
        self._silent[guest] = time.monotonic()
        (guest.wire.put_bytes if self._secret is None else guest.wire.put)(last)
        self._watch(guest)

    def drop(self, guest: Guest, error: Exception) -> None:
        """Hang up."""
        if self._forgotten(guest):
            guest.wire.close()
            self._lost(guest, error)

    def lend(self, guest: Guest) -> None:
        """The wire of a guest, for another thread until returned()."""
        self._forgotten(guest)
        self._lent.add(guest)

    def returned(self, guest: Guest) -> None:
        """The other thread has done with the wire, and may have closed it."""
        self._back.append(guest)
        self._bell.ring()
        if self._is_over:
            guest.wire.close()

    def hang_up(self) -> None:
        """On the guests whose wires are lent. Any thread may call it."""
        for guest in list(self._lent):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                guest.wire.hang_up()

    def _forgotten(self, guest: Guest) -> bool:
        self._silent.pop(guest, None)
        if self._guests.pop(guest, None) is None:
            return False
        self._selector.unregister(guest.wire.socket)
        return True

    def _take_back(self, guest: Guest, hear: Hear) -> None:
        self._lent.discard(guest)
        if guest.wire.socket.fileno() >= 0:
            self._selector.register(guest.wire.socket, selectors.EVENT_READ, guest)
            self._guests[guest] = time.monotonic()
            self._attend(guest, hear)  # of the next frame, a part may have come already

    def _attend(self, guest: Guest, hear: Hear) -> None:
        if guest not in self._guests:  # it has gone in this turn
            return
        try:
            guest.wire.flush()
            if not guest.is_told:
                self._hear(guest, hear)
            if guest in self._guests:
                self._watch(guest)
        except Exception as error:  # whatever its bytes have led to is the end of it alone
            logger.debug("a connection to the %s ends", self._door, exc_info=True)
            self.drop(guest, error)

    def _hear(self, guest: Guest, hear: Hear) -> None:
        if self._secret is None:
            hear(guest, guest.wire.taken(guest.wire.pull()) or b"")
            return
        if guest.nonce:
            self._let_in(guest, self._secret)
        if not guest.nonce:
            for frame in guest.wire.frames():
                self._silent.pop(guest, None)
                del self._guests[guest]
                self._guests[guest] = time.monotonic()  # as the last of them
                hear(guest, frame)
                if guest not in self._guests or guest.is_told:
                    return

    def _let_in(self, guest: Guest, secret: Secret) -> None:
        guest.wire.pull()
        reply = guest.wire.taken(REPLY_BYTES)
        if reply is not None:
            if self._lets_all_in:  # not before: the kernel takes milliseconds to list connections
                check_own(guest.wire.socket)
            answer = secret.answer(self._door, guest.nonce, reply)
            guest.wire.put_bytes(answer or bytes(PROOF_BYTES))
            if answer is None:
                raise PermissionError(f"it knows another {ENVIRONMENT}")
            guest.nonce = b""

    def _watch(self, guest: Guest) -> None:
        if guest.is_told and not guest.wire.must_write:
            self.drop(guest, ConnectionResetError("it has its last answer"))
        elif guest in self._guests:
            reads = 0 if guest.is_told else selectors.EVENT_READ
            writes = selectors.EVENT_WRITE if guest.wire.must_write else 0
            self._selector.modify(guest.wire.socket, reads | writes, guest)

    # -- who comes -------------------------------------------------------------------------

    def _accept(self, listener: Any) -> None:
        if self.rests_until is not None:  # another listener was in this turn, too
            return
        now, count = time.monotonic(), len(self._guests) + len(self._lent)
        is_full = count >= _descriptors()
        if not is_full and len(self._silent) < SILENT_MAX and self._guests_fit(now, count):
            try:
                connected, _ = listener.accept()
            except BlockingIOError:  # it has gone already
                return
            except OSError:  # there is no descriptor just now
                is_full = True
            else:
                self._was_full = False
                self._welcome(connected, now)
                return
        if is_full and not self._was_full:
            logger.warning(
                "nobody else is let in to the %s: it has %d connections, and the limit of open "
                "files (ulimit -n) of this process allows no more", self._door, count,
            )  # fmt: skip
        self._was_full = is_full
        for each in self._listeners:
            self._selector.unregister(each)
        self.rests_until = now + ROOM_S

    def _guests_fit(self, now: float, count: int) -> bool:
        """Whether there is room for one more. If not, one that is idle may have to go for it."""
        if self._most is None or count < self._most:
            return True
        idle = next((each for each in self._guests if each not in self._silent), None)
        if idle is None or now - self._guests[idle] < ROOM_S:  # it may ask at any moment
            return False
        self.drop(idle, TimeoutError("others came"))
        return True

    def _welcome(self, connected: socket.socket, now: float) -> None:
        self._count += 1
        nonce = new_nonce() if self._secret is not None else b""
        guest = Guest(Wire(connected, self._frame_max), self._count, nonce)
        self._guests[guest] = self._silent[guest] = now
        self._selector.register(connected, selectors.EVENT_READ, guest)
        try:
            if connected.family == socket.AF_UNIX:
                check_own(connected)
            if nonce:
                guest.wire.put_bytes(MAGIC + nonce)
        except OSError as error:  # it has gone, or is another user
            self.drop(guest, error)

    def _late(self) -> list[Guest]:
        now = time.monotonic()
        if self.rests_until is not None and now >= self.rests_until:
            self.rests_until = None
            for each in self._listeners:
                self._selector.register(each, selectors.EVENT_READ)
        patience_s = FIRST_S if len(self._silent) < SILENT_MAX // 2 else ROOM_S
        return [each for each, since in self._silent.items() if now - since > patience_s]

    def _patience_s(self, tick_s: float | None) -> float | None:
        """None: until something comes."""
        if self._silent or self.rests_until is not None:
            return ROOM_S if tick_s is None else min(ROOM_S, tick_s)
        return tick_s


def _descriptors() -> int:
    """How many guests there may be, of the descriptors that this process may open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if most == resource.RLIM_INFINITY else most - min(_SPARE, most // 4)


def _warn_of_networks(listeners: Sequence[socket.socket]) -> None:
    """Log once that anybody may come, if others than this host reach a listener."""
    for each in listeners:
        host, port = each.getsockname()[:2] if each.family != socket.AF_UNIX else ("::1", 0)
        if not _warned and not addresses.is_loopback(host):
            _warned.append(host)
            logger.warning(
                "%s is not set: every process that reaches %s may join this job, and take its "
                "state. Give all processes of the job the same: export %s=$(openssl rand -hex 32)",
                ENVIRONMENT, addresses.joined(host, port), ENVIRONMENT,
            )  # fmt: skip
