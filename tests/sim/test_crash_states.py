"""The power goes off before every single change that a save makes, in every way it can.

The changes of some saves are recorded: writes, syncs, names. Every state that a crash can leave
between any two of them is then recovered: no step that was promised by then is missing, every step
that is visible is that of one save, bit for bit, and the run goes on. Scenarios: with retention
and reuse of files, a step saved again, a rewind, and what a process that died had left behind.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sim.crash_states import Sample
from sim.job import HANG_S, Job
from sim.oracle import Oracle, blank, content, metrics_of
from statehold import Keep
from statehold.errors import StateholdError
from support.in_memory import SimFs
from support.stepped import simulated

# How many crash states to try for each change before some are drawn. With the variable set, all of
# them are tried, and deaths and errors at every operation; else one for every fourth change, and
# deaths and errors where names have changed and are not synced.
MOST = int(os.environ.get("STATEHOLD_CRASH_STATES", "2"))
ALL = "STATEHOLD_CRASH_STATES" in os.environ
AMONG = 4
SAMPLE = Sample(MOST, whole=ALL, among=AMONG)
LEAST = 2 if ALL else 1 / AMONG  # states for each change
Script = list[tuple[str, int]]
SCRIPTS: dict[str, Script] = {
    "reuse": [("save", 1), ("save", 2), ("save", 3), ("save", 4)],
    "again": [("save", 1), ("save", 2), ("save", 2), ("save", 3), ("save", 3)],
    "best": [("save", step) for step in (1, 2, 3, 3, 4, 5)],
    "rewind": [("save", 1), ("save", 2), ("save", 3), ("rewind", 2), ("save", 3)],
}
# After step 3 steps 1 and 2 go, after step 5 steps 3 and 4: several in a row, and not the oldest.
RULES = {"best": Keep(best=1, metric="loss")}
EVERYDAY = ((1, "best"), (1, "reuse"), (1, "again"), (1, "rewind"), (2, "again"))
AGAIN: Script = [("save", 1), ("save", 2), ("save", 2), ("save", 2), ("rewind", 1), ("save", 2)]
REFUSALS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Record:
    """What was promised when, while a disk was recorded. shares: its steps share files."""

    def __init__(self, keep: int | Keep, *, shares: bool = False) -> None:
        self.keep, self.shares = keep, shares
        self.events: list[tuple[int, Callable[[Oracle], None]]] = []

    def add(self, moment: int, tell: Callable[[Oracle], None]) -> None:
        self.events.append((moment, tell))

    def oracle(self, moment: int) -> Oracle:
        """What holds before change `moment`; saves that were begun later may be there or not."""
        oracle = Oracle(self.keep)
        for at, tell in self.events:
            if at <= moment:
                tell(oracle)
        return oracle


def play(job: Job, script: Script, record: Record, fs: SimFs, first: int) -> list[Any]:
    """Run a script on all ranks; serials are counted from `first`."""

    def program(rank: int) -> None:
        for serial, (what, step) in enumerate(script, first):
            if what == "save":
                record.add(len(fs.recorded), lambda o, s=step, n=serial: o.begin(s, n, job.size))
                state = content(rank, step, serial, shares=record.shares)
                save = job.ckpts[rank].save(step, state, metrics=metrics_of(step))
                save.wait("committed", HANG_S)
                record.add(len(fs.recorded), lambda o, s=step, n=serial: o.promise(s, n))
            else:
                record.add(len(fs.recorded), lambda o, s=step, n=serial: o.doubt(s, n))
                job.ckpts[rank].rewind(step)

    job.start(program)
    outcomes = job.end()
    job.close()
    return outcomes


def new_job(fs: SimFs, size: int, keep: int | Keep) -> Job:
    return Job(fs, size, secrets.token_hex(4), keep=keep)


def changes_a_name(operation: str) -> bool:
    """Whether this is D6 or R1: until D7 or R2 the old name may come back."""
    return operation.startswith(("exchange ", "rename ")) and ".spare" not in operation


def refuse_exchange(fs: SimFs, code: int = errno.EINVAL) -> SimFs:
    """A file system that cannot exchange two names."""
    fs.fail_next("exchange", code, 1 << 30, 0)
    return fs


def recover(fs: SimFs, oracle: Oracle, size: int, *, shares: bool = False) -> list[str]:
    """Restore every step on every rank, then save and restore that; what is wrong."""
    job = new_job(fs, size, oracle.keep or 1)
    visible = job.ckpts[0].steps()
    wrong = oracle.judge(visible)
    ahead = max(visible, default=0) + 1

    def program(rank: int) -> None:
        state = blank(shares=shares)
        for step in visible:
            job.ckpts[rank].restore(state, step)
            wrong.extend(oracle.judge_content(step, rank, state, state))
        new = content(rank, ahead, 99, shares=shares)
        job.ckpts[rank].save(ahead, new).wait("committed", HANG_S)
        if job.ckpts[rank].restore(state) != ahead or state["serial"] != 99:
            wrong.append("the step after the crash is not the newest")

    job.start(program)
    for outcome in job.end():
        if isinstance(outcome, Exception):
            wrong.append(f"{type(outcome).__name__}: {outcome}")
    job.close()
    return wrong


def recover_all(
    fs: SimFs, record: Record, size: int, seed: int = 0, *, exchanges: bool = True
) -> int:
    """Crash a recorded disk everywhere; how many states that were."""
    states = 0
    for moment, operation in enumerate(fs.recorded):
        for disk in SAMPLE.of(fs, moment, seed):
            states += 1
            if not exchanges:
                refuse_exchange(disk)
            with simulated(f"recover {seed} {moment} {states}"):
                found = recover(disk, record.oracle(moment), size, shares=record.shares)
            assert not found, f"power off before {moment}: {operation}: {found}"
    return states


JOBS = [
    (size, script) for size in (1, 2) for script in SCRIPTS if ALL or (size, script) in EVERYDAY
]


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "script"), JOBS)
def test_every_crash_state_of_a_job(size: int, script: str) -> None:
    keep = RULES.get(script, 2)
    fs, record = SimFs(seed=3), Record(keep)
    fs.record()
    with simulated(script):
        outcomes = play(new_job(fs, size, keep), SCRIPTS[script], record, fs, 1)
    assert outcomes == [None] * size
    states = recover_all(fs, record, size)
    print(f"{len(fs.recorded)} changes, {states} crash states")
    assert states >= int(LEAST * len(fs.recorded))


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2] if ALL else [2])
@pytest.mark.parametrize("code", REFUSALS if ALL else REFUSALS[:1])
def test_every_crash_state_of_a_job_that_cannot_exchange_names(size: int, code: int) -> None:
    fs, record = refuse_exchange(SimFs(seed=4), code), Record(keep=2)
    fs.record()
    with simulated(code):
        outcomes = play(new_job(fs, size, 2), AGAIN, record, fs, 1)
    assert outcomes == [None] * size
    assert fs.fired["injected exchange"] == 2
    states = recover_all(fs, record, size, exchanges=False)
    assert states >= int(LEAST * len(fs.recorded))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "exchanges"), [("reuse", True), ("again", True)] + [("again", False)] * ALL
)
@pytest.mark.parametrize("size", [1, 2] if ALL else [1])
def test_every_crash_state_after_a_process_has_died(
    size: int, script: str, exchanges: bool
) -> None:
    """A job is killed at each of its operations; the next one loses power at each of its own."""
    total = 0
    for dies_at in range(1, 1000):
        fs, record = SimFs(seed=dies_at), Record(keep=1)
        if not exchanges:
            refuse_exchange(fs)
        with simulated(f"first {dies_at}"):
            first = new_job(fs, size, 1)
            first.lives[0].dies_at = dies_at
            first.lives[0].dies_with_all = True
            play(first, SCRIPTS[script], record, fs, 1)
        if not first.lives[0].is_dead:
            break
        last = ["", *fs.operations][-1]
        if not ALL and not (changes_a_name(last) and (exchanges or "000002" in last)):
            continue
        fs.record()
        with simulated(f"next {dies_at}"):
            seen = new_job(fs, size, 1)
            ahead = max(seen.ckpts[0].steps(), default=0)
            got = play(seen, [("save", ahead), ("save", ahead + 1)], record, fs, 50)
        assert got == [None] * size
        total += recover_all(fs, record, size, dies_at, exchanges=exchanges)
    assert total > (10 if ALL else 10 / AMONG)


# Without an exchange of names, the errors of a Store are tried in test_store_crash_states.py.
ERRORS = [("sync_dir", True), ("unlink", True)]
MORE_ERRORS = [("exchange", True), ("rename", True)]
MORE_ERRORS += [("sync_dir", False), ("rename", False), ("unlink", False)]


@pytest.mark.thorough
@pytest.mark.parametrize(("operation", "exchanges"), ERRORS + MORE_ERRORS * ALL)
def test_every_crash_state_after_an_error(operation: str, exchanges: bool) -> None:
    """An operation fails, each time it is used; what is done about it loses no step either."""
    tried = 0
    for skip in range(200):
        fs, record = SimFs(seed=skip), Record(keep=1)
        fs.fail_next(operation, 5, 1, skip)
        if not exchanges:
            refuse_exchange(fs)
        fs.record()

        def program(rank: int, job: Job, record: Record = record, fs: SimFs = fs) -> None:
            # What an error has left is met by one more save of the same step.
            for serial, step in enumerate((1, 2, 2, 3) if exchanges else (1, 2, 2, 2, 3), 1):
                record.add(len(fs.recorded), lambda o, s=step, n=serial: o.begin(s, n, 1))
                try:
                    job.ckpts[0].save(step, content(0, step, serial)).wait("committed", HANG_S)
                except StateholdError:
                    continue
                record.add(len(fs.recorded), lambda o, s=step, n=serial: o.promise(s, n))

        with simulated(f"{operation} {skip}"):
            job = new_job(fs, 1, 1)
            job.start(partial(program, job=job))
            job.end()
            job.close()
        if not fs.fired.get(f"injected {operation}"):
            break
        failed = [at for at, each in enumerate(fs.recorded) if each.startswith(f"{operation} ")]
        before = fs.recorded[failed[skip] - 1]
        if ALL or (changes_a_name(before) if exchanges else "000002" in before):
            tried += recover_all(fs, record, 1, skip, exchanges=exchanges)
    assert tried > (10 if ALL else 10 / AMONG)
