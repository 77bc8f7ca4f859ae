"""Ranks around a coordinator, without time or network: each message is delivered at once."""

from __future__ import annotations

from dataclasses import replace

from statehold.resilience.protocol.coordinator import Coordinator
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import (
    Beat,
    Fenced,
    Hello,
    Message,
    Refused,
    View,
    decode,
    encode,
)

MICROBATCHES = 4
JOB = {"seed": "1"}


def hello(name: str, place: int = 0, width: int = 1, **more: object) -> Hello:
    first = Hello(name, place, width, JOB, View(0, digest="same"))
    return replace(first, **more)  # type: ignore[arg-type]


class Hall:
    """A coordinator, the connections to it, and what each has heard."""

    def __init__(self, expected: int | None = None, settle_s: float = 1.0) -> None:
        self.now = 100.0
        self.coordinator = Coordinator(expected, settle_s)
        self.members: dict[int, Member] = {}
        self.heard: dict[int, list[Message]] = {}
        self.deaf: set[int] = set()  # nothing reaches them, and they answer nothing
        self._next = 0

    def connect(self, member: Member | Hello) -> int:
        """The number of the new connection."""
        self._next += 1
        conn = self._next
        if isinstance(member, Hello):
            member = Member(member, MICROBATCHES)
        self.members[conn], self.heard[conn] = member, []
        self.deliver(self.coordinator.hello(conn, member.hello(), self.now))
        return conn

    def say(self, conn: int, message: Message) -> None:
        self.deliver(self.coordinator.receive(conn, decode(encode(message)), self.now))

    def lose(self, conn: int) -> None:
        self.deliver(self.coordinator.lost(conn, self.now))

    def wait(self, seconds: float, beats: bool = True) -> None:
        """Time passes in small ticks, in which everyone beats who can hear."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for conn in self.members.keys() - self.deaf if beats else ():
                self.say(conn, Beat(self.members[conn].step))
            self.deliver(self.coordinator.tick(self.now))

    def restart(self, settle_s: float = 1.0) -> None:
        """The coordinator has died, and knows nothing any more."""
        self.coordinator = Coordinator(None, settle_s)

    def deliver(self, sent: list[tuple[int, Message]]) -> None:
        for conn, message in sent:
            if conn in self.deaf:
                continue
            self.heard[conn].append(message)
            answer = self.members[conn].receive(decode(encode(message)))
            if answer is not None:
                self.say(conn, answer)

    def out(self, conn: int) -> Fenced | Refused | None:
        return self.members[conn].fenced

    @property
    def epoch(self) -> int:
        return self.coordinator.epoch

    @property
    def names(self) -> list[str]:
        return list(self.coordinator.members)
