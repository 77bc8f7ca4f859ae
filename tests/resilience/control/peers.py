"""Servers and ranks on the loopback, in threads of this process or as scripts; without torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from statehold.resilience.control import Link, Server
from statehold.resilience.protocol.coordinator import Coordinator
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import Hello, View

PATIENCE_S = 60.0  # a test that fails waits so long; no other waits
LONG_LEASE_S = 30.0


HELLO = Hello("x", 0, 1, {"seed": "1"}, View(0, digest="same"), lease_s=LONG_LEASE_S)


class Office:
    """A server in a thread."""

    def __init__(
        self, expected: int | None = None, port: int = 0, *, once: bool = False,
        coordinator: Coordinator | None = None,
    ) -> None:  # fmt: skip
        self.said: list[str] = []
        self.coordinator = coordinator or Coordinator(expected, settle_s=0.2)
        self.server = Server(self.coordinator, "127.0.0.1", port, self.said.append, once=once)
        self.port = self.server.port
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.stop()
        self.end()

    def end(self) -> None:
        """Wait until it stops by itself."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.server.close()


class Peer:
    """A rank: its member and its link."""

    def __init__(
        self, name: str, port: int, lease_s: float = LONG_LEASE_S, member: type[Member] = Member
    ) -> None:
        hello = Hello(name, 0, 1, {"seed": "1"}, View(0, digest="same"), lease_s=lease_s)
        self.member = member(hello, 4)
        self.is_stuck = False
        self.link = Link(
            ("127.0.0.1", port),
            self.member,
            lease_s=lease_s,
            on_change=lambda: None,
            is_stuck=lambda: self.is_stuck,
            drawn=dict,
        )

    def until(self, true: Callable[[Member], bool]) -> None:
        """Wait until the member is so."""
        with self.link.changed:
            found = self.link.changed.wait_for(lambda: true(self.member), PATIENCE_S)
        assert found, self.link.problem

    def until_in(self, *names: str, after: int = 0) -> None:
        self.until(lambda each: set(each.members) == set(names) and each.epoch > after)

    def cut(self) -> None:
        """The connection ends, and both sides learn it."""
        wire = self.link.wire
        assert wire is not None
        wire.hang_up()


def until(true: Callable[[], bool]) -> None:
    """Where nothing tells: look again and again."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def meeting(
    *names: str, last_lease_s: float = LONG_LEASE_S
) -> Iterator[tuple[Office, dict[str, Peer]]]:
    """Ranks in their first epoch. last_lease_s: of the last one."""
    office = Office(len(names))
    leases = [LONG_LEASE_S] * (len(names) - 1) + [last_lease_s]
    peers = {
        name: Peer(name, office.port, lease) for name, lease in zip(names, leases, strict=True)
    }
    try:
        for peer in peers.values():
            peer.until_in(*names)
        yield office, peers
    finally:
        for peer in peers.values():
            peer.link.close()
        office.close()
