"""Link: the connection of a rank to the coordinator, in a thread of its own.

It beats, answers the coordinator for the member, and connects again when the coordinator has been
restarted. The training thread waits on `changed` for what the member has learned.

Invariants:
- The member is touched only under `changed`.
- A beat is sent only while the training thread makes progress (R5).
- After Fenced or Refused the link ends, and says nothing more under that name (R10). A message that
  breaks the protocol does the same, so that nobody waits for a link that has ended.
Not here: what a message means (protocol/member), the groups (groups).
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

from statehold.errors import InvariantError
from statehold.process import forks
from statehold.process.addresses import joined
from statehold.resilience.control.server import Lines
from statehold.resilience.protocol.coordinator import RETURN_S
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import (
    Beat,
    Fenced,
    Leave,
    Message,
    decode,
    encode,
)

BEATS_OF_LEASE = 5
_CONNECT_S = 5.0
_AGAIN_S = (0.05, RETURN_S / 2)
_LEAVE_S = 2.0


class Link:
    """Connects at once, and again whenever the connection ends.

    address: host and port of `statehold coordinate`.
    on_change: called under `changed`, when the member has promised or entered an epoch, or is out.
    is_stuck: whether the training thread makes no progress; no beat is sent then.
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
        self.changed = threading.Condition()
        self.problem = "not connected yet"  # why there is no connection; "" if there is one
        self._address = address
        self._member = member
        self._beat_s = lease_s / BEATS_OF_LEASE
        self._on_change = on_change
        self._is_stuck = is_stuck
        self._drawn = drawn
        self._lines: Lines | None = None
        self._outbox: collections.deque[Message] = collections.deque()
        self._wake, self._waker = socket.socketpair()
        for each in (self._wake, self._waker):
            each.setblocking(False)
        self._ends = False
        forks.forget_in_children(self)
        self._thread = threading.Thread(target=self._run, name="statehold-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Soon, if there is a connection. What must not be lost is in every Hello, too."""
        self._outbox.append(message)
        self._nudge()

    def leave(self) -> None:
        """Tell that the last step is committed, and end."""
        with self.changed:
            self._outbox.append(Leave(self._member.view))
        self.close()

    def close(self) -> None:
        """End the thread and the connection; what waits to be sent is sent if that is quick."""
        self._ends = True
        self._nudge()
        self._thread.join(_LEAVE_S + _CONNECT_S)

    def forget(self) -> None:
        """In a forked child: the connection must end with the rank, and not with its children."""
        for each in (self._lines, self._wake, self._waker):
            if each is not None:
                each.close()

    # The thread

    def _run(self) -> None:
        pause = _AGAIN_S[0]
        while not self._ends and self._member.fenced is None:
            try:
                self._lines = self._connected()
                self.problem, pause = "", _AGAIN_S[0]
                self._talk(self._lines)
            except (OSError, ValueError) as error:
                self.problem = f"{joined(*self._address)}: {error}"
            if self._lines is not None:
                self._lines.close()
                self._lines = None
            if not self._ends and self._member.fenced is None:
                self._wait(None, pause)
                pause = min(2 * pause, _AGAIN_S[1])
        self._wake.close()
        self._waker.close()

    def _connected(self) -> Lines:
        connected = socket.create_connection(self._address, timeout=_CONNECT_S)
        lease_ms = int(1000 * self._beat_s * BEATS_OF_LEASE)
        with contextlib.suppress(OSError, AttributeError):  # a host that vanishes sends no end
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3 * lease_ms)
        return Lines(connected)

    def _talk(self, lines: Lines) -> None:
        for _ in range(len(self._outbox)):  # what comes from now on is not in the Hello
            each = self._outbox.popleft()
            if isinstance(each, Leave):
                self._outbox.append(each)
        with self.changed:
            hello = self._member.hello()
        lines.write(encode(hello))
        due = time.monotonic()
        while self._member.fenced is None:
            now = time.monotonic()
            if now >= due:
                due = now + self._beat_s
                self._beat(lines)
            while self._outbox:
                lines.write(encode(self._outbox.popleft()))
            if self._ends:
                self._finish(lines)
                return
            self._wait(lines, due - now)
            lines.flush()
            for line in lines.read():
                self._receive(lines, decode(line))

    def _beat(self, lines: Lines) -> None:
        if not self._is_stuck():
            with self.changed:
                beat = Beat(self._member.step, self._drawn())
            lines.write(encode(beat))

    def _receive(self, lines: Lines, message: Message) -> None:
        with self.changed:
            try:
                answer = self._member.receive(message)
            except InvariantError as error:
                self._member.fenced, answer = Fenced(f"the protocol is broken: {error}"), None
            self._on_change()
            self.changed.notify_all()
        if answer is not None:
            lines.write(encode(answer))

    def _finish(self, lines: Lines) -> None:
        """Hand over what is on its way, and wait until the other side has read all of it.

        A socket that is closed before it has been read from may drop what it had to send.
        """
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            lines.flush()
            if not lines.must_write:
                lines.socket.shutdown(socket.SHUT_WR)
            self._wait(lines, self._beat_s)
            lines.read()  # until ConnectionError: the other side has closed

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            self._waker.send(b"x")

    def _wait(self, lines: Lines | None, timeout_s: float) -> None:
        """Until the connection has something, or the training thread, or the time is over."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if lines is not None:
            poll.register(lines.socket, select.POLLIN | (select.POLLOUT if lines.must_write else 0))
        poll.poll(max(0.0, timeout_s) * 1000)
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass
