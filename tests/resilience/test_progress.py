"""When a microbatch is taken for hung, by a clock that the test sets."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from resilience.jobs import coordinated, replica
from resilience.replica import data
from statehold.resilience import replicas
from statehold.resilience.progress import STUCK_FIRST_S, STUCK_LEAST_S, StuckCheck
from statehold.resilience.protocol.messages import Fenced
from statehold.resilience.seat import Seat
from statehold.resilience.seat import SeatLost as Out


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def computed(
    progress: StuckCheck, clock: Clock, seconds: float, *, is_computed: bool = True
) -> None:
    progress.begin()
    clock.now += seconds
    progress.end(is_computed=is_computed)


def is_stuck_after(progress: StuckCheck, clock: Clock, seconds: float) -> bool:
    progress.begin()
    clock.now += seconds
    return progress.is_stuck()


def test_the_first_microbatch_is_compared_with_none() -> None:
    """R13: it compiles for minutes. But it cannot hang for ever."""
    clock = Clock()
    progress = StuckCheck(None, clock)
    assert not is_stuck_after(progress, clock, 10 * STUCK_LEAST_S)
    assert is_stuck_after(progress, clock, STUCK_FIRST_S + 1)
    assert progress.passed_s == STUCK_FIRST_S


@pytest.mark.parametrize(("longest", "limit"), [(1.0, STUCK_LEAST_S), (20.0, 200.0)])
def test_a_later_one_is_compared_with_the_longest(longest: float, limit: float) -> None:
    clock = Clock()
    progress = StuckCheck(None, clock)
    computed(progress, clock, longest)
    computed(progress, clock, longest / 2)
    assert not is_stuck_after(progress, clock, limit)
    assert is_stuck_after(progress, clock, limit + 1)
    assert progress.passed_s == limit
    assert not is_stuck_after(progress, clock, 1.0)
    assert progress.passed_s is None  # that was another one


def test_one_that_was_left_is_no_measure() -> None:
    """Its user has waited for an hour, and then pressed Ctrl-C."""
    clock = Clock()
    progress = StuckCheck(None, clock)
    computed(progress, clock, 1.0)
    computed(progress, clock, STUCK_FIRST_S, is_computed=False)
    assert is_stuck_after(progress, clock, STUCK_LEAST_S + 1)


def test_a_limit_of_the_user_is_that_of_the_first_one_too() -> None:
    clock = Clock()
    assert is_stuck_after(StuckCheck(1.5, clock), clock, 2.0)


def test_who_is_out_for_a_slow_microbatch_names_the_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons, seats, checks = list[str](), list[Seat](), list[StuckCheck]()
    check = Seat.check

    def made(stuck_s: float | None) -> StuckCheck:
        checks.append(StuckCheck(stuck_s))
        return checks[-1]

    def checking(seat: Seat) -> None:
        seats.append(seat)
        try:
            check(seat)
        except Out as out:
            reasons.append(str(out))
            raise

    monkeypatch.setattr(Seat, "check", checking)
    monkeypatch.setattr(replicas, "StuckCheck", made)
    with coordinated(1) as meeting, replica(meeting.address, stuck_s=0.01) as slow:
        is_out = False
        steps = slow.steps(1)
        for microbatch in next(steps):
            if not is_out:
                wait_until(checks[0].is_stuck)
                with seats[-1].link.changed:
                    seats[-1].member.receive(Fenced("its lease"))
                is_out = True
            microbatch.backward(slow.state["model"](data()[:1]).sum())
    assert reasons[:1] == [
        "its lease, because a microbatch took longer than 0.01 s (stuck_s= sets this limit)"
    ]


def wait_until(happens: Any) -> None:
    waiting = threading.Event()
    while not happens():
        waiting.wait(0.001)
