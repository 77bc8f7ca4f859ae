"""Calls side by side: bounded, all ended on return, whatever one of them does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.io.objects.parallel import Parallel
from support.faults import DEADLINE_S, must


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    made = Parallel(3, "test")
    yield made
    made.close()


def test_results_are_in_order_and_calls_side_by_side(parallel) -> None:
    barrier = threading.Barrier(3)

    def call(number: int) -> int:
        barrier.wait(DEADLINE_S)
        return number

    assert parallel([lambda n=n: call(n) for n in range(6)]) == list(range(6))
    assert parallel([]) == []


def test_nothing_is_under_way_after_a_failure(parallel) -> None:
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
        parallel([lasts, fails, *[lasts] * 20])
    assert len(begun) == len(ended) >= 1


def test_parts_cover_what_is_moved(parallel) -> None:
    memories = [bytearray(10), bytearray(0), bytearray(7)]

    def move(begin: int, memory: memoryview) -> None:
        memory[:] = bytes(range(begin, begin + len(memory)))
        must(len(memory) <= 4)

    targets = [(begin, memoryview(memories[i])) for i, begin in enumerate((100, 50, 20))]
    parallel.move(targets, 4, move)
    assert memories == [bytes(range(100, 110)), b"", bytes(range(20, 27))]


def test_a_fork_has_threads_of_its_own(parallel) -> None:
    calls = [lambda: 1] * 5
    assert sum(parallel(calls)) == 5
    child = os.fork()
    if child == 0:
        os._exit(0 if sum(parallel(calls)) == 5 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_files_that_are_read_are_located_side_by_side() -> None:
    barrier = threading.Barrier(3)

    def locate(name: str, nbytes: int, ranges: object) -> str:
        barrier.wait(DEADLINE_S)
        return f"/near/{name}"

    plan = ReadPlan(None)  # type: ignore[arg-type]
    plan._files = {name: (number, 10 * number) for number, name in enumerate("abc")}
    found = plan._located(locate, {0: [], 1: [], 2: []})
    assert found == {"/near/a": 0, "/near/b": 10, "/near/c": 20}
