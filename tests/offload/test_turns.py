"""Optimizers that share a path move bytes one at a time, in each direction, and none starves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from statehold import offload
from statehold.offload.store import PathTurns, Turn
from support.faults import DEADLINE_S, must
from support.forked import forked


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def _take_turns(path: str, rounds: int, entered: Any, inside: Any, done: Any) -> None:
    """On two threads: turns in which no other process may be inside."""
    turn = PathTurns(path).write
    mine, sharing = threading.Lock(), [0]

    def moves() -> None:
        for _ in range(rounds):
            with turn.taken():
                with mine:
                    sharing[0] += 1
                    if sharing[0] == 1:
                        must(inside.acquire(block=False), "two processes have one turn")
                time.sleep(0.0005)  # so that another one would come in
                with mine:
                    sharing[0] -= 1
                    if sharing[0] == 0:
                        inside.release()

    entered.wait()
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(moves) for _ in range(2)]:
            each.result()
    done.put(os.getpid())


def test_processes_exclude_each_other_and_all_go_on(tmp_path: Path, processes: list[Any]) -> None:
    context, count = forked(), 4
    entered, inside, done = context.Barrier(count), context.Semaphore(1), context.Queue()
    for _ in range(count):
        words = (str(tmp_path), 40, entered, inside, done)
        processes.append(context.Process(target=_take_turns, args=words))
        processes[-1].start()
    for each in processes:
        each.join(DEADLINE_S)
    assert [each.exitcode for each in processes] == [0] * count
    assert {done.get() for _ in range(count)} == {each.pid for each in processes}


def test_threads_share_a_turn_until_another_optimizer_waits(tmp_path: Path) -> None:
    """Then those that come later wait, although their optimizer has the turn."""
    mine, other = PathTurns(str(tmp_path)), PathTurns(str(tmp_path))
    order: list[str] = []

    def take(turn: Turn, name: str) -> None:
        with turn.taken():
            order.append(name)

    with mine.read.taken():
        take(mine.read, "joins")
        waiter = threading.Thread(target=take, args=(other.read, "the other one"))
        waiter.start()
        until = time.monotonic() + DEADLINE_S
        while not mine.read.is_wanted:
            must(time.monotonic() < until)
        late = threading.Thread(target=take, args=(mine.read, "comes later"))
        late.start()
        assert order == ["joins"]
    for thread in (waiter, late):
        thread.join()
    assert order == ["joins", "the other one", "comes later"]
    for turns in (mine, other):
        turns.close()


def _hold(path: str, held: Any) -> None:
    with PathTurns(path).read.taken():
        held.set()
        time.sleep(600)


def test_a_killed_holder_frees_its_turn(tmp_path: Path, processes: list[Any]) -> None:
    context = forked()
    held = context.Event()
    processes.append(context.Process(target=_hold, args=(str(tmp_path), held)))
    processes[-1].start()
    must(held.wait(DEADLINE_S))
    turns = PathTurns(str(tmp_path))
    with turns.write.taken():  # another direction, another turn
        pass
    with PathTurns(str(tmp_path.parent)).read.taken():  # another path
        pass
    order: list[str] = []

    def take() -> None:
        with turns.read.taken():
            order.append("taken")

    waiter, onlooker = threading.Thread(target=take), PathTurns(str(tmp_path))
    waiter.start()
    until = time.monotonic() + DEADLINE_S
    while not onlooker.read.is_wanted:
        must(time.monotonic() < until)
    order.append("killed")
    processes[-1].kill()
    waiter.join()
    assert order == ["killed", "taken"]
    onlooker.close()
    turns.close()


def test_optimizers_take_turns_unless_a_path_is_not_exclusive(tmp_path: Path) -> None:
    def train(exclusive: bool) -> None:
        weight = torch.nn.Parameter(torch.zeros(100_000))
        tiers = [offload.Path(tmp_path, exclusive=exclusive)]
        optimizer = offload.AdamW([weight], tiers=tiers, subgroup_bytes=49_152)
        weight.grad = torch.ones(100_000)
        optimizer.step()
        optimizer.step()
        optimizer.close()

    for name in ("read", "write"):
        turns = PathTurns(str(tmp_path))
        turn: Turn = getattr(turns, name)
        with turn.taken():
            train(exclusive=False)
            other = threading.Thread(target=train, args=(True,))
            other.start()
            until = time.monotonic() + DEADLINE_S
            while not turn.is_wanted:
                must(time.monotonic() < until)
            assert other.is_alive()
        other.join()
        turns.close()
