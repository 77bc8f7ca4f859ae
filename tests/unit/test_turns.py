"""Whose turn it is: all ranks agree, whatever each one knows, or agree again soon."""

from __future__ import annotations

import random

import pytest

from statehold.checkpoint.cadence.schedule import GROWING_MAX, LAG, SaveRule, Turns, is_past_next


def due(turns: Turns, steps: list[int]) -> list[int]:
    return [step for number, step in enumerate(steps) if turns.call(number, step)]


def test_each_tenth_step_and_the_first() -> None:
    assert due(Turns(10), list(range(1, 35))) == [1, 10, 20, 30]
    assert due(Turns(1), [3, 4, 7]) == [3, 4, 7]
    assert due(Turns(10), list(range(7, 60, 7))) == [7, 14, 21, 35, 42, 56]


def test_after_a_restore_the_next_multiple() -> None:
    turns = Turns(10)
    turns.last_step = 17
    assert due(turns, list(range(18, 35))) == [20, 30]


def test_a_step_that_is_saved_again_or_wanted_is_due() -> None:
    turns = Turns(10)
    found = [turns.call(0, 1), turns.call(1, 2), turns.call(2, 2)]
    found += [turns.call(3, 3, wanted=True), turns.call(4, 4)]
    assert found == [True, False, True, True, False]


def test_what_is_due_does_not_depend_on_what_was() -> None:
    """So that ranks agree again as soon as they have the same interval."""
    steps = sorted(random.Random(3).sample(range(1000), 200))
    expected = [is_past_next(a, b, 7) for a, b in zip([None, *steps], steps, strict=False)]
    turns = Turns(7)
    pending = [turns.call(number, step, wanted=step % 5 == 0) for number, step in enumerate(steps)]
    assert all(each == (past or step % 5 == 0)
               for each, past, step in zip(pending, expected, steps, strict=True))  # fmt: skip


def test_until_something_is_told_the_interval_doubles() -> None:
    found = due(Turns(None), list(range(1, 200)))
    assert found[:4] == [1, 2, 4, 8]
    assert found[4:] == list(range(16, 200, GROWING_MAX))


def test_alone_it_holds_from_the_next_save_on() -> None:
    turns = Turns(None, lag=0)
    turns.call(0, 1)
    turns.learn(SaveRule(0, 5))
    turns.call(1, 2)
    found = [step for step in range(3, 20) if turns.call(step, step)]
    assert found == [5, 10, 15]


# -- several ranks ---------------------------------------------------------------------------------


class Job:
    """Ranks that call alike, any of which may be behind with hearing of outcomes: by two saves, as
    many as may be under way. Rank 0 tells a new interval now and then."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = [Turns(None) for _ in range(ranks)]
        self.under_way: list[list[tuple[int, SaveRule | None]]] = [[] for _ in range(ranks)]
        self.lost: set[tuple[int, int]] = set()  # (rank, number of the save)
        self.number = 0
        self.note: list[SaveRule] = []

    def call(self, step: int) -> list[bool]:
        """One call on all ranks."""
        number, self.number = self.number, self.number + 1
        found = [turns.call(number, step) for turns in self.ranks]
        leader = self.ranks[0]
        if all(found) and leader.pending is None and self.random.random() < 0.5:
            leader.learn(SaveRule(number, self.random.choice([1, 2, 3, 7, 10])))
        if found[0]:
            self.note = [leader.rule, *([leader.pending] if leader.pending else [])]
        for rank, is_due in enumerate(found):
            if is_due:
                self.under_way[rank].append((number, leader.pending))
            if is_due and not all(found):  # nobody commits what not all save
                self.lost.add((rank, number))
            self.hear(rank, 2 if is_due else self.random.randint(0, 2))
        return found

    def hear(self, rank: int, left: int) -> None:
        """Let outcomes arrive until so many saves are under way."""
        while len(self.under_way[rank]) > left:
            number, pending = self.under_way[rank].pop(0)
            if rank and (rank, number) in self.lost:
                self.look(rank)
            elif rank and pending is not None:
                self.ranks[rank].learn(pending)

    def look(self, rank: int) -> None:
        """A rank whose save failed looks for what rank 0 has left."""
        rule, *pending = self.note
        self.ranks[rank].adopt(rule)
        for each in pending:
            self.ranks[rank].learn(each)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_agree_whenever_they_hear(seed: int) -> None:
    job = Job(4, seed)
    found = [job.call(step) for step in range(400)]
    assert all(len(set(each)) == 1 for each in found), f"seed {seed}"
    assert len({turns.rule for turns in job.ranks}) == 1
    assert job.ranks[0].rule.since > 0


@pytest.mark.parametrize("seed", range(20))
def test_one_outcome_that_is_missed_changes_nothing(seed: int) -> None:
    job = Job(3, seed)
    job.look = lambda rank: None  # type: ignore[method-assign]  # and the note is not needed
    number = job.random.randrange(40)
    job.lost = {(2, number)}
    found = [job.call(step) for step in range(300)]
    assert all(len(set(each)) == 1 for each in found), f"seed {seed}"


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_misses_all_for_a_while_agrees_again(seed: int) -> None:
    """It finds nothing and hears nothing in 60 calls; after that, of the first saves that fail."""
    job = Job(3, seed)
    job.look = lambda rank: None  # type: ignore[method-assign]
    job.lost = {(2, number) for number in range(20, 80)}
    for step in range(80):
        job.call(step)
    del job.look
    split = [step for step in range(80, 400) if len(set(job.call(step))) > 1]
    assert max(split, default=0) < 120, f"seed {seed}: {split}"
    assert len({turns.rule.steps for turns in job.ranks}) == 1


def test_ranks_come_apart_if_nothing_is_done() -> None:
    """What the test above would miss if it tested nothing."""
    apart = 0
    for seed in range(40):
        job = Job(3, seed)
        job.look = lambda rank: None  # type: ignore[method-assign]
        job.lost = {(2, number) for number in range(20, 400)}
        apart += any(len(set(job.call(step))) > 1 for step in range(400))
    assert apart > 30


def test_settled_is_the_last_but_one() -> None:
    turns = Turns(10)
    found = []
    for number in range(35):
        if turns.call(number, number + 1):
            found.append(turns.settled)
    assert found == [-1, -1, 0, 9]
    assert LAG == 4
