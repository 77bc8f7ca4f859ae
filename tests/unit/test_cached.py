"""cached: no thread waits for the computation of another instance."""

from __future__ import annotations

import threading

from statehold.format.saved import cached
from support.faults import must

DEADLINE_S = 30


class Slow:
    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.count = 0

    @cached
    def value(self) -> list[int]:
        """What it is."""
        self.count += 1
        self.began.set()
        must(self.may_end.wait(DEADLINE_S))
        return [self.count]


def test_it_is_computed_once() -> None:
    slow = Slow()
    slow.may_end.set()
    assert slow.value == [1]
    assert slow.value is slow.value
    assert slow.count == 1
    assert Slow.value.__doc__ == "What it is."


def test_a_thread_that_stalls_holds_nobody_up() -> None:
    stalled, other = Slow(), Slow()
    thread = threading.Thread(target=lambda: stalled.value)
    thread.start()
    must(stalled.began.wait(DEADLINE_S))
    other.may_end.set()
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.append(other.value), daemon=True)
    reader.start()
    reader.join(DEADLINE_S)
    stalled.may_end.set()
    thread.join(DEADLINE_S)
    assert found == [[1]]


def test_all_threads_get_the_same_value() -> None:
    slow, found = Slow(), []
    threads = [threading.Thread(target=lambda: found.append(slow.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    slow.may_end.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found[0] is found[1]
