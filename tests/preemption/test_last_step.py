"""All ranks get the same last step, whoever is asked, and nobody waits for a rank that is done."""

from __future__ import annotations

import itertools
import threading

import pytest

from statehold.errors import PeerLostError
from statehold.ranks.peers import Peers
from statehold.ranks.preemption import Preemption
from statehold.ranks.preemption.deadline import Deadline
from statehold.ranks.preemption.exchange import Hearing, LastStep, Position
from support.boards import peers_of
from support.faults import DEADLINE_S, must
from support.in_memory import MemoryBoard
from support.interrupts import interrupt_everywhere

SIZE = 3


class Watched(LastStep):
    """Says when it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = threading.Event()

    def freeze(self) -> Position:
        seen = super().freeze()
        self.frozen.set()
        return seen


class Rank:
    """One rank's part of it, without signals, and with a deadline that ends nothing."""

    def __init__(self, peers: Peers) -> None:
        self.last = Watched()
        self.deadline = Deadline(DEADLINE_S, lambda why: self.hearing.wake())
        self.hearing = Hearing(peers, self.deadline, self.last)

    def asks(self, step: int) -> bool:
        """What is_last(step) says, which must not take long."""
        told: list[bool] = []
        thread = threading.Thread(target=lambda: told.append(self.last.is_last(step)), daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        must(told, "is_last() did not return")
        return told[0]


def ranks_on(board: MemoryBoard) -> list[Rank]:
    ranks = [Rank(peers) for peers in peers_of(lambda: board, SIZE)]
    threads = [threading.Thread(target=rank.hearing.peers.open) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.hearing.start()
    return ranks


def wait_frozen(ranks: list[Rank]) -> None:
    for rank in ranks:
        must(rank.last.frozen.wait(DEADLINE_S), "a rank has not heard of it")


def check_alike(seen: tuple[int, ...]) -> None:
    ranks = [LastStep() for _ in seen]
    for last, newest in zip(ranks, seen, strict=True):
        answers = [last.is_last(step) for step in range(newest + 1)]
        assert not any(answers)
    passed = max([last.freeze() for last in ranks])
    for last, newest in zip(ranks, seen, strict=True):
        last.decide(passed)
        later = [last.is_last(step) for step in range(newest, 8)]
        assert later == [step > max(seen) for step in range(newest, 8)]


def test_wherever_the_ranks_are_they_stop_at_the_same_step() -> None:
    for seen in itertools.product([4, 5, 6], repeat=SIZE):
        check_alike(seen)


def test_a_restore_counts_anew() -> None:
    last = LastStep()
    assert not last.is_last(100)
    last.begin_again()
    assert not last.is_last(7)
    passed = last.freeze()
    last.decide(passed)
    assert passed == (1, 7)
    assert [last.is_last(step) for step in (7, 8)] == [False, True]


def test_a_step_waits_until_it_is_decided() -> None:
    last = LastStep()
    last.freeze()
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(last.is_last(1)))
    thread.start()
    thread.join(0.05)
    assert not told
    last.decide((0, 3))
    thread.join(DEADLINE_S)
    assert told == [False]


def test_one_is_asked_and_all_hear_of_it_and_of_its_time() -> None:
    ranks = ranks_on(MemoryBoard())
    for rank, step in zip(ranks, (5, 6, 6), strict=True):
        assert not rank.asks(step)
    ranks[1].deadline.ask(20)
    wait_frozen(ranks)
    assert [rank.asks(6) for rank in ranks] == [False] * SIZE
    assert [rank.asks(7) for rank in ranks] == [True] * SIZE
    assert all(rank.deadline.remaining_s() < 20 for rank in ranks)
    for rank in ranks:
        rank.hearing.stop()


@pytest.mark.parametrize("closing", [0, 2])
def test_nobody_waits_for_a_rank_that_has_closed(closing: int) -> None:
    ranks = ranks_on(MemoryBoard())
    for rank in ranks:
        assert not rank.asks(5)
    ranks[closing].hearing.stop()
    ranks[1].deadline.ask(DEADLINE_S)
    others = [rank for rank in ranks if rank is not ranks[closing]]
    wait_frozen(others)
    assert [rank.asks(6) for rank in others] == [True, True]
    for rank in others:
        rank.hearing.stop()


def test_ranks_whose_store_is_gone_leave_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    board = MemoryBoard()
    ranks = [Preemption(DEADLINE_S, peers) for peers in peers_of(lambda: board, SIZE)]
    hearings = [rank.hearing for rank in ranks if rank.hearing is not None]

    def gone(_key: str) -> bytes:
        raise PeerLostError("the store is gone", ranks=(0,))

    monkeypatch.setattr(board, "peek", gone)
    before = [rank.is_last(5) for rank in ranks]
    for hearing in hearings:
        hearing.start()
    for hearing in hearings:
        hearing.thread.join(DEADLINE_S)
    ranks[1].ask(None)
    after = [rank.is_last(6) for rank in ranks]
    assert before == [False] * SIZE
    assert [hearing.is_deaf for hearing in hearings] == [True] * SIZE
    assert after == [False, True, False]


def test_ctrl_c_in_the_trainer_does_not_keep_the_ranks_from_deciding() -> None:
    def call(last: LastStep) -> None:
        last.is_last(3)
        last.begin_again()

    places = interrupt_everywhere(
        [LastStep.is_last, LastStep.begin_again],
        LastStep,
        call,
        lambda last: (last.decide(last.freeze()), last.is_last(9)),
    )
    assert {"is_last", "begin_again"} <= places
