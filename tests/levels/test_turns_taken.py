"""The first level's cadence: which calls of save() save, alone and on several ranks."""

from __future__ import annotations

import errno
import itertools
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import statehold
from statehold import Directory, Save
from statehold.checkpoint.cadence.every import Cadence
from statehold.checkpoint.cadence.schedule import Schedule
from statehold.errors import (
    PeerLostError,
    StateholdError,
    StepOrderError,
    UnsupportedValueError,
    UsageError,
)
from statehold.options import Options
from statehold.ranks.membership import ALONE
from support.faults import DEADLINE_S, SMALL, must, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.inside import borrowed, inside, passage, trainer
from support.interrupts import Interrupts
from support.levels import settle, steps_at
from support.rank_states import state
from support.ranks import Ranks

RUN = "/near"


def content(step: int) -> dict[str, Any]:
    return {"w": torch.full((8,), step), "step": step}


def opened(fs: SimFs, every: int | str) -> statehold.Checkpointer:
    return checkpointer_on(fs, "/run", levels=[Directory(path=RUN, every=every)], **SMALL)


def save(ckpt: statehold.Checkpointer, step: int, **how: Any) -> Save:
    handle = ckpt.save(step, content(step), **how)
    return handle if handle.is_skipped else handle.wait("committed", DEADLINE_S)


def test_only_steps_that_are_due_are_saved() -> None:
    fs = SimFs(seed=1)
    with opened(fs, 3) as ckpt:
        saves = [save(ckpt, step) for step in range(1, 9)]
        assert steps_at(fs, RUN) == [1, 3, 6]
    assert [each.step for each in saves if each.is_skipped] == [2, 4, 5, 7, 8]
    assert [each.done() for each in saves] == [not each.is_skipped for each in saves]
    with pytest.raises(UsageError, match="step 2 was not due, so nothing was saved"):
        saves[1].wait("staged")
    assert "not due" in repr(saves[1])


def test_what_is_not_due_is_saved_if_it_has_to_be() -> None:
    fs = SimFs(seed=1)
    with opened(fs, 10) as ckpt:
        saves = [save(ckpt, step, force=step == 5) for step in range(1, 12)]
    assert [each.step for each in saves if not each.is_skipped] == [1, 5, 10]


def test_the_last_save_of_a_process_that_is_to_leave_is_due() -> None:
    fs = SimFs(seed=1)
    with opened(fs, 10) as ckpt:
        ckpt.is_last = lambda step: step == 3  # type: ignore[method-assign]
        saves = [save(ckpt, step) for step in range(1, 5)]
    assert [each.step for each in saves if not each.is_skipped] == [1, 3]


def test_a_step_that_is_not_due_is_not_looked_at() -> None:
    """Neither is the state, nor the storage, nor a gate; figures of saves do not count it."""
    fs = SimFs(seed=1)
    calls: list[str] = []
    with opened(fs, 10) as ckpt:
        save(ckpt, 1)
        inside(ckpt).pipeline.drain()
        spy_on(ckpt, lambda operation, _args: calls.append(operation))
        skipped = ckpt.save(2, {"what": print})
        assert skipped.is_skipped
        assert skipped.stats.blocked_s == 0
        assert skipped not in trainer(ckpt).gate.held
        assert skipped not in trainer(ckpt).watched
        assert calls == []
        with pytest.raises(UnsupportedValueError):
            ckpt.save(10, {"what": print})


def test_a_failure_is_raised_by_the_next_call_due_or_not() -> None:
    fs = SimFs(seed=1)
    with opened(fs, 10) as ckpt:
        fs.fail_next("rename", errno.EIO)
        failed = ckpt.save(1, content(1))
        passage(failed).wait_ended("committed", DEADLINE_S)
        with pytest.raises(StateholdError):
            ckpt.save(2, content(2))
        assert fs.fired["injected"] == 1
        skipped = save(ckpt, 3)
        assert skipped.is_skipped


def test_a_run_goes_on_with_the_next_multiple() -> None:
    fs = SimFs(seed=1)
    with opened(fs, 10) as ckpt:
        for step in (7, 12):
            save(ckpt, step, force=True)
    with opened(fs, 10) as ckpt:
        live = content(0)
        ckpt.restore(live)
        found = [step for step in range(13, 35) if not save(ckpt, step).is_skipped]
        assert found == [20, 30]
        ckpt.rewind(12)
        found = [step for step in range(13, 35) if not save(ckpt, step).is_skipped]
        assert found == [20, 30]


def saved(ckpt: statehold.Checkpointer, clock: SimpleNamespace, steps: range) -> list[int]:
    """Those of the steps that are saved, at ten seconds a step."""
    found = []
    for step in steps:
        clock.now_s += 10.0
        found += [] if save(ckpt, step).is_skipped else [step]
    return found


def timed(fs: SimFs, clock: SimpleNamespace) -> statehold.Checkpointer:
    """Saves once in a minute."""
    ckpt = opened(fs, "60s")
    borrowed(ckpt).clock = lambda: clock.now_s
    return ckpt


@pytest.mark.parametrize("rewinds", [True, False])
def test_a_time_decides_again_where_the_run_goes_back(
    fs: SimFs, clock: SimpleNamespace, *, rewinds: bool
) -> None:
    """No step was saved before the run had come as far again, and no call said so."""
    with timed(fs, clock) as ckpt:
        assert saved(ckpt, clock, range(1, 20)) == [1, 7, 13, 19]
        ckpt.restore(content(0), 7)
        if not rewinds:  # the step is due, so the call says what is wrong
            with pytest.raises(StepOrderError, match="step 8 is older than step 19"):
                save(ckpt, 8)
        assert ckpt.rewind(7) == [13, 19]
        assert saved(ckpt, clock, range(9, 24)) == [9, 15, 21]
        ckpt.rewind(21)  # no step goes, so the time goes on
        assert saved(ckpt, clock, range(24, 30)) == [27]


def test_a_time_counts_from_the_newest_step_that_is_there(
    fs: SimFs, clock: SimpleNamespace
) -> None:
    """After a save that failed, whether in the background or in the call, the next one is due."""
    with timed(fs, clock) as ckpt:
        assert saved(ckpt, clock, range(1, 7)) == [1]
        clock.now_s += 10.0
        fs.fail_next("rename", errno.EIO)
        passage(ckpt.save(7, content(7))).wait_ended("committed", DEADLINE_S)
        assert fs.fired["injected"] == 1
        with pytest.raises(StateholdError, match="EIO"):
            ckpt.save(8, content(8))
        inside(ckpt).pipeline.drain()  # the thread that commits hears of it
        with pytest.raises(UnsupportedValueError):
            ckpt.save(9, {"what": print})
        inside(ckpt).pipeline.drain()
        assert saved(ckpt, clock, range(10, 20)) == [10, 16]
        with pytest.raises(UsageError):  # it was not due, and refused all the same
            ckpt.save(20, content(20), tags="no list")
        inside(ckpt).pipeline.drain()
        assert saved(ckpt, clock, range(21, 25)) == [23]


def test_a_failure_is_heard_of_once_at_whatever_moment_of_a_call() -> None:
    """The thread that commits tells of it. A call compared a step with None, which raised."""
    for moment in itertools.count():
        levels: list[Any] = [Directory(every="60s")]
        alone: Any = (ALONE, Options(), [SimpleNamespace()])
        schedule = Schedule(levels, [], *alone, lambda _: -math.inf, lambda: 0.0)
        call = partial(schedule.is_due, wanted=False, is_saving=False, gate_s=0.0)
        must(call(0, 1))
        functions = [Cadence.is_due, Cadence.go_on_from, Schedule.is_due]
        failure = Interrupts(functions, moment, act=lambda told=schedule: told.failed(0))
        with failure.armed():
            found = [call(1, 2)]
        if not failure.fired:
            break
        assert sum([*found, call(2, 3), call(3, 4)]) == 1
    assert moment > len(functions)


def test_the_status_says_how_often_and_why() -> None:
    fs = SimFs(seed=1)
    with opened(fs, "auto") as ckpt:
        for step in range(1, 70):
            save(ckpt, step)
        [status] = ckpt.levels()
        interval = status.interval
        assert interval is not None
        assert status.newest is not None
        assert interval.steps >= 1
        assert interval.cost_s >= 0
        assert 0 < interval.waste < 1
    with opened(fs, 3) as ckpt:
        assert [each.interval for each in ckpt.levels()] == [None]


# -- several ranks ---------------------------------------------------------------------------------

SIZE = 3


@pytest.fixture
def clock() -> SimpleNamespace:
    """The time that a schedule sees: one second a step, set by the test."""
    return SimpleNamespace(now_s=0.0)


@pytest.fixture
def fs() -> SimFs:
    return SimFs(seed=1)


def job(fs: SimFs, every: int | str, clock: SimpleNamespace | None = None, **options: Any) -> Ranks:
    levels = [Directory(path=RUN, every=every, keep=2)]
    ranks = Ranks(fs, SIZE, run=RUN, levels=levels, **options)
    for ckpt in ranks.ckpts if clock is not None else ():
        borrowed(ckpt).clock = lambda: clock.now_s
    return ranks


def call(ranks: Ranks, step: int) -> list[bool]:
    """One call on all ranks: whether each saved. Saves are waited for, however they end."""

    def act(rank: int) -> bool:
        handle = ranks.ckpts[rank].save(step, state(rank, step))
        if not handle.is_skipped:
            passage(handle).wait_ended("committed", DEADLINE_S)
            passage(handle).is_raised = handle.error is not None  # this loop goes on whatever fails
        return not handle.is_skipped

    return ranks.each(act)


def trained(ranks: Ranks, clock: SimpleNamespace, steps: range) -> Iterator[list[bool]]:
    for step in steps:
        clock.now_s = float(step)
        yield call(ranks, step)


def test_ranks_save_the_same_steps_without_a_word(fs: SimFs, clock: SimpleNamespace) -> None:
    with job(fs, 4, clock) as ranks:
        found = list(trained(ranks, clock, range(1, 14)))
    assert [step for step, due in enumerate(found, 1) if due == [True] * SIZE] == [1, 4, 8, 12]
    assert sum(map(sum, found)) == 4 * SIZE


def test_a_time_becomes_steps_that_rank_0_tells(fs: SimFs, clock: SimpleNamespace) -> None:
    with job(fs, "5s", clock) as ranks:
        found = list(trained(ranks, clock, range(1, 200)))
        assert {inside(ckpt).schedule.turns.rule.steps for ckpt in ranks.ckpts} == {5}
    assert all(len(set(due)) == 1 for due in found)
    assert [step for step, due in enumerate(found, 1) if due[0]][-5:] == [175, 180, 185, 190, 195]


class Deaf:
    """A rank that misses what rank 0 tells: the outcomes, and the note."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.peers: Any = inside(ranks.ckpts[rank]).peers
        self.missed = 0

    def __enter__(self) -> Deaf:
        outcome: Callable[[int, float], bytes] = self.peers.outcome

        def lost(seq: int, waiting_s: float = 0.0) -> bytes:
            outcome(seq, waiting_s)
            self.missed += 1
            raise PeerLostError("it went by", ranks=[0])

        self.peers.outcome = lost
        self.peers.peek = lambda _what: None
        return self

    def __exit__(self, *_: object) -> None:
        del self.peers.outcome, self.peers.peek


def test_a_rank_that_missed_one_outcome_saves_as_the_others(
    fs: SimFs, clock: SimpleNamespace
) -> None:
    with job(fs, "5s", clock) as ranks:
        told: list[list[int]] = []
        spy = inside(ranks.ckpts[0]).schedule
        is_told = False
        for step in range(1, 200):
            clock.now_s = float(step)
            if spy.message() is None or is_told:
                due = call(ranks, step)
            else:  # the next outcome tells it again, and this rank misses that one
                is_told = True
                with Deaf(ranks, 2):
                    due = call(ranks, step)
            assert len(set(due)) == 1, step
            told += [each for each in [spy.message()] if each]
        assert is_told
        assert {inside(ckpt).schedule.turns.rule.steps for ckpt in ranks.ckpts} == {5}


def test_a_rank_that_missed_all_of_it_comes_back_by_itself(
    fs: SimFs, clock: SimpleNamespace
) -> None:
    """It stays with another interval, its saves and those of the others fail for that, in time and
    by name, and after a few of them all ranks save the same steps again."""
    with job(fs, "5s", clock) as ranks:
        rules = [inside(ckpt).schedule.turns for ckpt in ranks.ckpts]
        step = 1
        with Deaf(ranks, 2) as deaf:
            while rules[0].rule.steps != 5:  # told, and in force on the others
                clock.now_s = float(step)
                call(ranks, step)
                step += 1
        assert deaf.missed > 3
        assert rules[2].rule.steps != 5
        for ckpt in ranks.ckpts:
            inside(ckpt).peers.timeout_s = 0.6  # type: ignore[union-attr]
        found = list(trained(ranks, clock, range(step, step + 80)))
        apart = [index for index, due in enumerate(found) if len(set(due)) > 1]
        assert apart
        assert len(apart) <= 8
        assert max(apart) < 40
        assert {turns.rule.steps for turns in rules} == {5}
        for ckpt in ranks.ckpts:
            inside(ckpt).peers.timeout_s = DEADLINE_S  # type: ignore[union-attr]
        found = list(trained(ranks, clock, range(step + 80, step + 85)))
        assert any(map(all, found))
    assert max(steps_at(fs, RUN)) > step + 70


def test_the_note_is_what_ranks_have(fs: SimFs, clock: SimpleNamespace) -> None:
    with job(fs, "5s", clock) as ranks:
        list(trained(ranks, clock, range(1, 100)))
        note = inside(ranks.ckpts[1]).peers.peek("turns")  # type: ignore[union-attr]
        assert note is not None
        rule = inside(ranks.ckpts[1]).schedule.turns.rule
        assert json.loads(note) == [[rule.since, rule.steps]]


def test_ranks_choose_together_and_say_why(
    fs: SimFs, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 has the figures; all have the interval. What save() blocks is real here, and small
    against steps of an hour: it is free."""
    caplog.set_level("INFO", "statehold")
    with job(fs, "auto", clock, nodes=64) as ranks:
        found = []
        for step in range(1, 120):
            clock.now_s = 3600.0 * step
            found.append(call(ranks, step))
        assert all(len(set(due)) == 1 for due in found)
        assert found[-30:] == [[True] * SIZE] * 30
        shown = [ckpt.levels()[0].interval for ckpt in ranks.ckpts]
    assert shown[0] is not None
    assert (shown[0].steps, shown[0].cost_s, shown[1:]) == (1, 0.0, [None, None])
    lines = [each.getMessage() for each in caplog.records if "gets a step" in each.getMessage()]
    assert lines[-1].startswith("level directory gets a step every step (1 h 00 min): each is free")


def test_a_level_away_gets_what_is_worth_it() -> None:
    fs = SimFs(seed=1)
    levels = [Directory(path=RUN, every=2), Directory(path="/far", name="far", every="auto")]
    with checkpointer_on(fs, "/run", levels=levels, **SMALL) as ckpt:
        for step in range(1, 60):
            save(ckpt, step)
            settle(ckpt)
        near, far = ckpt.levels()
    assert near.interval is None
    assert far.interval is not None
    assert far.interval.steps % 2 == 0
    assert far.interval.mtbf_s > 86_400  # it is no better than the near one: needed if that is bad
