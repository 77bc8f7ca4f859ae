"""What the protocol costs grows with the replicas of a job, and not with their square."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from statehold.resilience.protocol.coordinator import Coordinator, Sent
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import Beat, Hello, View
from support.calls import calls_of

T = TypeVar("T")

LEASE_S = 1.0


class Name(str):
    """A name whose comparisons are calls that are counted, wherever a list is searched for it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def counted(action: Callable[[], T]) -> tuple[T, int]:
    """Its result, and its calls."""
    found: list[T] = []
    calls = calls_of(lambda: found.append(action()))
    return found[0], calls


class Job:
    """A coordinator and the members of a job, without sockets. calls: of each side."""

    def __init__(self, replicas: int) -> None:
        self.coordinator = Coordinator(replicas)
        self.members: dict[int, Member] = {}
        self.calls = Counter[str]()
        for conn in range(replicas):
            said = Hello(Name(conn), 0, 1, {}, View(0), lease_s=LEASE_S)
            self.members[conn] = Member(said, microbatches=replicas)

    def begin(self) -> None:
        for conn, member in self.members.items():
            self.tell(partial(self.coordinator.hello, conn, member.hello(), 0.0))

    def lose(self, conn: int) -> None:
        del self.members[conn]
        self.tell(partial(self.coordinator.lost, conn, 0.5))

    def tell(self, event: Callable[[], Sent]) -> None:
        waiting = deque([event])
        while waiting:
            sent, calls = counted(waiting.popleft())
            self.calls["coordinator"] += calls
            for conn, message in sent:
                answer, calls = counted(partial(self.members[conn].receive, message))
                self.calls["a member"] = max(self.calls["a member"], calls)
                if answer is not None:
                    waiting.append(partial(self.coordinator.receive, conn, answer, 0.5))


def formed(replicas: int) -> Job:
    job = Job(replicas)
    job.begin()
    assert job.coordinator.epoch == 1
    assert len(job.coordinator.members) == replicas
    return job


@pytest.mark.parametrize("who", ["coordinator", "a member"])
def test_an_epoch_costs_as_much_more_as_it_has_replicas(who: str) -> None:
    def count(replicas: int) -> int:
        job = formed(replicas)
        job.lose(replicas // 2)
        assert job.coordinator.epoch == 2
        return job.calls[who]

    few, some, many = count(10), count(40), count(160)
    assert many - some < 6 * (some - few), (few, some, many)


def test_a_beat_and_a_tick_cost_the_same_for_any_number_of_replicas() -> None:
    def count(replicas: int) -> tuple[int, int]:
        job = formed(replicas)
        job.coordinator.tick(0.1)
        beat = calls_of(lambda: job.coordinator.receive(1, Beat(0), 0.1))
        return beat, calls_of(lambda: job.coordinator.tick(0.12))

    assert count(100) == count(10)


def test_every_lease_ends_in_time_whichever_is_shortest() -> None:
    coordinator, leases = Coordinator(3), (3.0, 0.5, 1.0)
    for conn, lease_s in enumerate(leases):
        coordinator.hello(conn, Hello(Name(conn), 0, 1, {}, View(0), lease_s=lease_s), 0.0)
    lost: dict[str, float] = {}
    for tick in range(1, 200):
        now = tick / 50
        coordinator.tick(now)
        lost |= {str(n): now for n in range(3) if str(n) not in {*coordinator.replicas, *lost}}
    assert lost == {"0": 3.02, "1": 0.52, "2": 1.02}
