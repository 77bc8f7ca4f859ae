"""Calls side by side: bounded, all ended on return, whatever one of them does; and calls apart."""

from __future__ import annotations

import os
import threading

import pytest

from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.io.objects.parallel import apart, move, side_by_side
from support.faults import DEADLINE_S, must

THREADS = 3


def test_results_are_in_order_and_calls_side_by_side() -> None:
    barrier = threading.Barrier(THREADS)

    def call(number: int) -> int:
        barrier.wait(DEADLINE_S)
        return number

    assert side_by_side([lambda n=n: call(n) for n in range(6)], THREADS) == list(range(6))
    assert side_by_side([], THREADS) == []


def test_nothing_is_under_way_after_a_failure() -> None:
    begun, ended = [], []
    failed = threading.Event()

    def fails() -> None:
        failed.set()
        raise ValueError

    def lasts() -> None:
        begun.append(1)
        must(failed.wait(DEADLINE_S))
        ended.append(1)

    with pytest.raises(ValueError):
        side_by_side([lasts, fails, *[lasts] * 20], THREADS)
    assert len(begun) == len(ended) >= 1


def test_parts_cover_what_is_moved() -> None:
    memories = [bytearray(10), bytearray(0), bytearray(7)]

    def fill(begin: int, memory: memoryview) -> None:
        memory[:] = bytes(range(begin, begin + len(memory)))
        must(len(memory) <= 4)

    targets = [(begin, memoryview(memories[i])) for i, begin in enumerate((100, 50, 20))]
    move(targets, 4, fill, THREADS)
    assert memories == [bytes(range(100, 110)), b"", bytes(range(20, 27))]


def test_a_fork_needs_nothing() -> None:
    calls = [lambda: 1] * 5
    assert sum(side_by_side(calls, THREADS)) == 5
    child = os.fork()
    if child == 0:
        os._exit(0 if sum(side_by_side(calls, THREADS)) == 5 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_nobody_waits_for_a_call_that_never_ends() -> None:
    never, looked = threading.Event(), []

    def look(waited_s: float) -> None:
        looked.append(waited_s)
        if len(looked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart(never.wait, look)
    never.set()
    assert looked == sorted(looked)
    assert apart(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 // 0)


def test_files_that_are_read_are_located_side_by_side() -> None:
    barrier = threading.Barrier(3)

    def locate(name: str, nbytes: int, ranges: object) -> str:
        barrier.wait(DEADLINE_S)
        return f"/near/{name}"

    plan = ReadPlan(None)  # type: ignore[arg-type]
    plan._files = {name: (number, 10 * number) for number, name in enumerate("abc")}
    found = plan._located(locate, {0: [], 1: [], 2: []})
    assert found == {"/near/a": 0, "/near/b": 10, "/near/c": 20}
