"""When the deadline ends the process: on a clock of the test's, so exactly, on any machine."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from statehold.ranks.preemption import LATE, LEFT, deadline
from statehold.ranks.preemption.deadline import Deadline
from support.faults import DEADLINE_S, must


class Clock:
    """Stands still until it is set, and knows that it was looked at."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._looks = 0
        self._looked = threading.Condition()

    def __call__(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self._now_s

    def advance(self, seconds: float) -> None:
        with self._looked:
            self._now_s += seconds

    def wait_looked_at(self) -> None:
        """Return once somebody has looked twice: after the first look he had time to act."""
        with self._looked:
            seen = self._looks
            must(self._looked.wait_for(lambda: self._looks >= seen + 2, DEADLINE_S))

    def wait_looks(self, count: int) -> None:
        with self._looked:
            must(self._looked.wait_for(lambda: self._looks >= count, DEADLINE_S))


class Ended:
    """Stands for the end of the process. It notes the exit code and the time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_over = threading.Event()
        self.told: list[tuple[int, float]] = []

    def __call__(self, code: int) -> None:
        self.told.append((code, self._clock()))
        self._is_over.set()

    def wait(self) -> None:
        must(self._is_over.wait(DEADLINE_S))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Deadline], None]]:
    """Lets a deadline watch, and forgets it afterwards: a process has one, and keeps it."""
    monkeypatch.setattr(deadline, "_active", None)
    yield Deadline.install
    signal.set_wakeup_fd(-1)


@pytest.mark.parametrize(
    ("within_s", "ends_after_s"), [(1.0, 0.75), (4.0, 3.0), (8.0, 6.0), (60.0, 58.0)]
)
def test_the_process_ends_itself_so_long_before_its_time_is_up(
    within_s: float, ends_after_s: float, installed: Callable[[Deadline], None]
) -> None:
    clock = Clock()
    ended = Ended(clock)
    watched = Deadline(within_s, clock=clock, end=ended)
    installed(watched)
    watched.ask()
    just_before_s = 2.0**-10
    clock.advance(ends_after_s - just_before_s)
    watched.end_in(within_s)  # no later, and it looks at its clock
    clock.wait_looked_at()
    assert ended.told == []
    clock.advance(just_before_s)
    ended.wait()
    assert ended.told == [(LATE, 1000.0 + ends_after_s)]


def test_nothing_of_it_stays_when_it_is_removed(installed: Callable[[Deadline], None]) -> None:
    """Each fork held signals back once more for every one that there had been."""
    watched = Deadline(60.0)
    installed(watched)
    watched.remove()
    left = weakref.ref(watched)
    del watched
    gc.collect()
    assert left() is None


def test_an_earlier_warning_is_not_put_off(installed: Callable[[Deadline], None]) -> None:
    clock = Clock()
    ended = Ended(clock)
    watched = Deadline(8.0, clock=clock, end=ended)
    installed(watched)
    watched.ask()
    clock.advance(1.0)
    watched.end_in(2.0)
    watched.ask()
    watched.safe()
    assert watched.remaining_s() == 2.0
    clock.advance(2.0)
    watched.end_in(8.0)
    ended.wait()
    assert ended.told == [(LEFT, 1003.0)]


@pytest.mark.parametrize("within_s", [4e6, float("inf"), 10**400], ids=["long", "inf", "huge"])
def test_a_nearer_warning_is_heard_after_one_far_away(
    within_s: float, installed: Callable[[Deadline], None]
) -> None:
    clock = Clock()
    ended = Ended(clock)
    watched = Deadline(within_s, clock=clock, end=ended)
    installed(watched)
    watched.ask()
    clock.wait_looks(2)  # the second is the thread's, which then polls for so long
    watched.end_in(2.0)
    clock.advance(2.0)
    watched.end_in(8.0)
    ended.wait()
    assert ended.told == [(LATE, 1002.0)]
