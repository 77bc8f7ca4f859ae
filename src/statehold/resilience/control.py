"""The protocol on sockets: the process that coordinates, and the thread of a rank that talks to it.

    Server    the process of `statehold coordinate`: one thread, any number of ranks
    Link      the connection of a rank: it beats, answers, and connects again

The server brings events to the coordinator. The link answers the coordinator for the member, and
connects again when the coordinator has been restarted. The training thread waits on `changed` for
what the member has learned.

Invariants:
- The server writes nothing to disk. After a restart the ranks tell it what it knew (R12).
- The member is touched only under `changed`.
- A beat is sent only while the training thread makes progress (R5).
- After Fenced or Refused the link ends, and says nothing more under that name (R10). A message that
  breaks the protocol does the same, so that nobody waits for a link that has ended.
- Nothing here imports torch, and no bytes of the training state pass through here.
Not here: decisions (protocol/coordinator), what a message means (protocol/member), who is let in
(net/reception), the groups (groups).
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from statehold.errors import InvariantError
from statehold.net import addresses
from statehold.net.reception import Guest, Reception
from statehold.net.secret import of_job
from statehold.net.wire import FRAME_MAX, Bell, SecretError, Wire, connect
from statehold.process.worker import Thread
from statehold.resilience.protocol.coordinator import RETURN_S, Coordinator
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import (
    Beat,
    Complaint,
    Fenced,
    Hello,
    Install,
    Leave,
    Message,
    Prepare,
    Refused,
    decode,
    encode,
)

_DOOR = "coordinator"

# -- the server ------------------------------------------------------------------------------------


TICK_S = 0.02
# A frame of a peer that has not said who it is.
FIRST_MAX = 1 << 20


class Server:
    """Listens, and serves ranks until `stop`.

    once: also stop when the last rank has left, for one job. A rank that is lost has not left.
    host: of the interface to listen on; "" listens on all. port: 0 takes a free one.
    report: called with one line of text for each event that an operator wants to know.
    names: of the ranks that are connected, by connection. reception: lets them in.
    Raises PortInUseError, and UsageError for an address of another machine.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        host: str,
        port: int,
        report: Callable[[str], None],
        *,
        once: bool = False,
    ) -> None:
        self._once = once
        self._coordinator = coordinator
        self._report = report
        secret = of_job()
        listener = addresses.listener("the coordinator", host, port)
        self.port: int = listener.getsockname()[1]
        self.reception = Reception([listener], _DOOR, secret, frame_max=FIRST_MAX)
        self._guests: dict[int, Guest] = {}  # that have said who they are
        self.names: dict[int, str] = {}
        self._left: set[int] = set()
        self._unsent: collections.deque[tuple[int, Message]] = collections.deque()
        self._sends = False
        self._told: Message | None = None
        self._encoded = b""  # of `_told`
        self._ticked = 0.0

    def serve(self) -> None:
        """Until `stop`, which may be called by another thread or by a signal handler."""
        self.reception.serve(self._hear, self._lose, self._tick, TICK_S)

    def stop(self) -> None:
        self.reception.stop()

    def close(self) -> None:
        """Close all sockets; the ranks go on with their steps, and wait for another coordinator."""
        self.reception.close()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._send(self._coordinator.tick(now))

    def _hear(self, guest: Guest, line: bytes) -> None:
        message, conn, now = decode(line), guest.number, time.monotonic()
        if isinstance(message, Hello):
            if conn in self.names:
                raise ValueError("a second Hello")
            guest.wire.frame_max = FRAME_MAX
            self._guests[conn] = guest
            self.names[conn] = f"{message.replica} rank {message.place}"
            self._report(f"{self.names[conn]} has connected, at step {message.view.step}")
            self._send(self._coordinator.hello(conn, message, now))
            return
        if conn not in self.names:
            raise ValueError("no Hello")
        if isinstance(message, Leave):
            self._left.add(conn)
            self._report(f"{self.names[conn]} has left, at step {message.view.step}")
        if isinstance(message, Complaint):
            self._report(f"{self.names[conn]} complains: {message.reason}")
        self._send(self._coordinator.receive(conn, message, now))

    def _lose(self, guest: Guest, error: Exception) -> None:
        conn = guest.number
        self._guests.pop(conn, None)
        name = self.names.pop(conn, "a stranger")
        if conn not in self._left:
            self._report(f"{name} has gone: {error}")
        elif self._once and not self.names:
            self._report("the job has ended")
            self.stop()
        self._left.discard(conn)
        self._send(self._coordinator.lost(conn, time.monotonic()))

    def _send(self, sent: Iterable[tuple[int, Message]]) -> None:
        """In the order of the coordinator, also if a peer is lost meanwhile."""
        self._unsent.extend(sent)
        if self._sends:
            return
        self._sends = True
        try:
            while self._unsent:
                self._write(*self._unsent.popleft())
        finally:
            self._sends = False

    def _write(self, conn: int, message: Message) -> None:
        guest = self._guests.get(conn)
        if guest is None:
            return
        if message is not self._told:  # an Install names all replicas, and goes to all ranks
            self._encoded = encode(message)
        self._tell(conn, message)
        try:
            self.reception.put(guest, self._encoded)
        except OSError as error:
            self.reception.drop(guest, error)

    def _tell(self, conn: int, message: Message) -> None:
        """One line for what goes to many ranks."""
        if isinstance(message, Fenced | Refused):
            facts = message.facts if isinstance(message, Refused) else {}
            details = "".join(f"; {name}: {value}" for name, value in facts.items())
            self._report(f"{self.names.get(conn)} is out: {message.reason}{details}")
        elif message == self._told:
            pass
        elif isinstance(message, Install):
            names, count = ", ".join(message.members), len(message.members)
            replicas = f"{count} replica{'s' if count > 1 else ''}"
            self._report(f"epoch {message.epoch} has {replicas}: {names}")
        elif isinstance(message, Prepare):
            self._report(f"epoch {message.epoch} is in preparation")
        self._told = message


# -- the link --------------------------------------------------------------------------------------


BEATS_OF_LEASE = 5
_CONNECT_S = 5.0
_AGAIN_S = (0.05, RETURN_S / 2)
_LEAVE_S = 2.0


class Link:
    """Connects at once, and again whenever the connection ends.

    address: host and port of `statehold coordinate`.
    on_change: called under `changed`, when the member has promised or entered an epoch, or is out.
    is_stuck: whether the training thread makes no progress; no beat is sent then.
    wire: the connection; None while there is none.
    drawn: the checksums of the samples of the round in progress, for each beat.
    """

    def __init__(
        self,
        address: tuple[str, int],
        member: Member,
        *,
        lease_s: float,
        on_change: Callable[[], None],
        is_stuck: Callable[[], bool],
        drawn: Callable[[], Mapping[str, int]],
    ) -> None:
        # Written in C: no exception in the trainer, as after Ctrl-C, leaves it taken.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.problem = "not connected yet"  # why there is no connection; "" if there is one
        self._address = address
        self._member = member
        self._beat_s = lease_s / BEATS_OF_LEASE
        self._on_change = on_change
        self._is_stuck = is_stuck
        self._drawn = drawn
        self._secret = of_job()
        self.wire: Wire | None = None
        self._outbox: collections.deque[Message] = collections.deque()
        self._bell = Bell()
        self._ends = False
        self._thread = Thread(self._run, "statehold-link")
        self._thread.start()

    def send(self, message: Message) -> None:
        """Soon, if there is a connection. What must not be lost is in every Hello, too."""
        self._outbox.append(message)
        self._bell.ring()

    def leave(self) -> None:
        """Tell that the last step is committed, and end."""
        with self.lock:
            self._outbox.append(Leave(self._member.view))
        self.close()

    def close(self) -> None:
        """End the thread and the connection; what waits to be sent is sent if that is quick."""
        self._ends = True
        self._bell.ring()
        self._thread.join(_LEAVE_S + _CONNECT_S)

    # The thread

    def _run(self) -> None:
        pause = _AGAIN_S[0]
        while self._goes_on():
            try:
                self.wire = self._connected()
                self.problem, pause = "", _AGAIN_S[0]
                self._talk(self.wire)
            except (OSError, ValueError) as error:
                self.problem = f"{addresses.joined(*self._address)}: {error}"
                if isinstance(error, SecretError) and not self._member.epoch:
                    reason = {"reason": error.strerror or ""}
                    self._receive(Refused("the coordinator does not let this replica in", reason))
            if self.wire is not None:
                self.wire.close()
                self.wire = None
            if self._goes_on():
                self._wait(None, pause)
                pause = min(2 * pause, _AGAIN_S[1])
        self._bell.close()

    def _goes_on(self) -> bool:
        return not self._ends and self._member.fenced is None

    def _connected(self) -> Wire:
        until = time.monotonic() + _CONNECT_S
        wire = connect(self._address, _DOOR, self._secret, until)
        lease_ms = int(1000 * self._beat_s * BEATS_OF_LEASE)
        with contextlib.suppress(OSError, AttributeError):  # a host that vanishes sends no end
            wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3 * lease_ms)
        return wire

    def _talk(self, wire: Wire) -> None:
        for _ in range(len(self._outbox)):  # what comes from now on is not in the Hello
            each = self._outbox.popleft()
            if isinstance(each, Leave):
                self._outbox.append(each)
        with self.lock:
            hello = self._member.hello()
        wire.put(encode(hello))
        due = time.monotonic()
        while self._member.fenced is None:
            now = time.monotonic()
            if now >= due:
                due = now + self._beat_s
                self._beat(wire)
            while self._outbox:
                wire.put(encode(self._outbox.popleft()))
            if self._ends:
                self._finish(wire)
                return
            self._wait(wire, due - now)
            wire.flush()
            for line in wire.frames():
                answer = self._receive(decode(line))
                if answer is not None:
                    wire.put(encode(answer))

    def _beat(self, wire: Wire) -> None:
        if not self._is_stuck():
            with self.lock:
                beat = Beat(self._member.step, self._drawn())
            wire.put(encode(beat))

    def _receive(self, message: Message) -> Message | None:
        """What the member answers."""
        with self.lock:
            try:
                answer = self._member.receive(message)
            except InvariantError as error:
                self._member.fenced, answer = Fenced(f"the protocol is broken: {error}"), None
            self._on_change()
            self.changed.notify_all()
        return answer

    def _finish(self, wire: Wire) -> None:
        """Hand over what is on its way, and wait until the other side has read all of it.

        A socket that is closed before it has been read from may drop what it had to send.
        """
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            wire.flush()
            if not wire.must_write:
                wire.socket.shutdown(socket.SHUT_WR)
            self._wait(wire, self._beat_s)
            collections.deque(wire.frames(), 0)  # until ConnectionError: the other side has closed

    def _wait(self, wire: Wire | None, timeout_s: float) -> None:
        """Until the connection has something, or the training thread, or the time is over."""
        poll = select.poll()
        poll.register(self._bell.ear, select.POLLIN)
        if wire is not None:
            poll.register(wire.socket, select.POLLIN | (select.POLLOUT if wire.must_write else 0))
        poll.poll(max(0.0, timeout_s) * 1000)
        self._bell.heard()
