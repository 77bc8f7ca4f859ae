"""The power goes off before every change that a Store makes while it replaces steps by renames.

What a Checkpointer never does at once is done here: a step is given up while the files of the save
that it has replaced are being overwritten. So each sync of the protocol is needed by itself. Every
state is read before any recovery, recovered, and saved into again; where a replacement was cut off,
the power goes off again during that. After an error one state is tried for every third change;
STATEHOLD_CRASH_STATES=32 tries all or many of them everywhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

import pytest

from sim.crash_states import Sample
from statehold.errors import StorageError
from statehold.format.saved import MANIFEST_NAME
from statehold.steps.store import Store
from support.in_memory import SimFs

RUN, DATA, BYTES = "/run", "data", 5000
MOST = int(os.environ.get("STATEHOLD_CRASH_STATES", "4"))
ALL = "STATEHOLD_CRASH_STATES" in os.environ
SAMPLE, WHOLE = Sample(MOST, whole=ALL, among=3), Sample(MOST, whole=True)
Allowed = dict[int, set[int | None]]  # step -> the values that it may have; None: no step


class Script:
    """Actions on a recorded disk, and what may be there after each."""

    def __init__(self, fs: SimFs) -> None:
        self.fs = fs
        self.store = opened(fs)
        self.allowed: Allowed = {1: {None}, 2: {None}, 3: {None}}
        self.history: list[tuple[int, Allowed]] = [(0, self.allowed)]
        self.errors = 0
        self._act({}, self.store.create)

    def save(self, step: int, value: int) -> None:
        def act() -> None:
            write(self.fs, self.store, step, value)
            self.store.commit(step, bytes([value]))

        self._act({step: {value}}, act)
        self.store.abandon(step)

    def begin(self, step: int, value: int) -> None:
        """Write a step that is not committed yet."""
        self._act({}, lambda: write(self.fs, self.store, step, value))

    def rewind(self, step: int) -> None:
        given_up: Allowed = {each: {None} for each in self.allowed if each > step}
        self._act(given_up, lambda: self.store.rewind(step))

    def _act(self, after: Allowed, act: Callable[[], object]) -> None:
        either = {step: now | after.get(step, now) for step, now in self.allowed.items()}
        self.history.append((len(self.fs.recorded), either))
        try:
            act()
        except StorageError:
            self.allowed = either
            self.errors += 1
        else:
            self.allowed = {**self.allowed, **after}
            self.history.append((len(self.fs.recorded), self.allowed))

    def at(self, moment: int) -> Allowed:
        """What a crash before this change may leave."""
        return [allowed for begun, allowed in self.history if begun <= moment][-1]


def opened(fs: SimFs) -> Store:
    fs.fail_next("exchange", errno.EINVAL, 1 << 30, 0)
    return Store(fs, RUN)


def write(fs: SimFs, store: Store, step: int, value: int) -> None:
    """D1 and D2."""
    store.begin(step)
    file, _ = store.data_file(step, DATA, BYTES)
    file.close()
    fs.write_file(f"{store.partial(step)}/{DATA}", bytes([value]) * BYTES)


def look(fs: SimFs) -> dict[int, int]:
    """The value of each step, as a reader finds it. Raises AssertionError if one is not whole."""
    store, found = Store(fs, RUN), {}
    for step in store.steps():
        (value,) = store.read(step, MANIFEST_NAME, 10)
        data = store.read(step, DATA, BYTES)
        assert data == bytes([value]) * BYTES, f"step {step} has bytes of another save"
        found[step] = value
    return found


def check(fs: SimFs, allowed: Allowed) -> None:
    found = look(fs)
    for step, values in allowed.items():
        assert found.get(step) in values, f"step {step}: {found.get(step)}, and not one of {values}"


def go_on(fs: SimFs) -> None:
    """What the next job does."""
    store = opened(fs)
    store.create()
    store.recover()
    write(fs, store, 2, 99)
    store.commit(2, bytes([99]))


def check_all(
    fs: SimFs,
    at: Callable[[int], Allowed],
    seed: int,
    *,
    again: bool = True,
    sample: Sample = WHOLE,
) -> int:
    """Crash a recorded disk everywhere; how many states that were."""
    states = 0
    for moment, operation in enumerate(fs.recorded):
        for disk in sample.of(fs, moment, seed):
            states += 1
            try:
                states += check_state(disk, at(moment), again=again)
            except AssertionError as error:
                raise AssertionError(f"power off before {moment}: {operation}: {error}") from error
    return states


def check_state(disk: SimFs, allowed: Allowed, *, again: bool) -> int:
    names = [name for name, _ in disk.listdir(RUN)] if disk.is_dir(RUN) else []
    is_cut_off = any(name.endswith(".replaced") for name in names)
    check(disk, allowed)
    disk.record()
    go_on(disk)
    check(disk, {**allowed, 2: {99}})
    assert not any(name.endswith(".replaced") for name, _ in disk.listdir(RUN))
    if not again or not is_cut_off:
        return 0
    return check_all(disk, lambda _: {**allowed, 2: allowed[2] | {99}}, 1, again=False)


def play(fs: SimFs, arm: Callable[[], None] = lambda: None) -> Script:
    fs.record()
    script = Script(fs)
    arm()
    script.save(1, 1)
    script.save(2, 20)
    script.save(2, 21)
    script.save(2, 22)
    script.begin(3, 30)  # into the files of what was replaced
    script.rewind(1)
    script.rewind(1)  # as after an error
    script.save(2, 23)
    return script


def test_every_crash_state() -> None:
    fs = SimFs(seed=1)
    script = play(fs)
    assert script.errors == 0
    assert fs.fired["injected exchange"] == 2
    states = check_all(fs, script.at, 1)
    assert states > 4 * len(fs.recorded)


@pytest.mark.thorough
@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("operation", ["rename", "sync_dir", "rmdir", "unlink"])
def test_every_crash_state_after_an_error(operation: str, failures: int) -> None:
    """An operation fails, each time it is used, once or twice in a row."""
    tried = 0
    for skip in range(200):
        fs = SimFs(seed=skip)
        script = play(fs, partial(fs.fail_next, operation, errno.EIO, failures, skip))
        if not fs.fired.get(f"injected {operation}"):
            break
        tried += 1
        check_all(fs, script.at, skip, again=False, sample=SAMPLE)
    assert tried >= 3
