"""A job keeps the memory that it copies from or to alive, and lets go of it on a Python thread."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from statehold import _core
from statehold.errors import ClosedError
from support.disks import BUFFER, DEADLINE_S, EXTERNAL, Disk, State, random_arrays, save
from support.faults import must


class Owner:
    """What a caller would free: dropping it overwrites the memory, as the next user would."""

    def __init__(self, state: State) -> None:
        self.arrays = state.arrays
        self.others: list[Any] = []
        weakref.finalize(self, _overwrite, list(state.arrays))


def _overwrite(arrays: list[Any]) -> None:
    for array in arrays:
        array.fill(0xFF)


def larger_than_staging(seed: int) -> State:
    state = State(random_arrays(seed, 4 * BUFFER, 4 * BUFFER), header=b"")
    for array in state.arrays:
        array &= 0x7F  # so that 0xFF is a byte of another owner
    return state


def started(engine: _core.Engine, state: State) -> tuple[_core.WriteJob, weakref.ref[Owner]]:
    """A job that cannot end, for it has no file, and a reference that says whether it has let go
    of its owner."""
    owner = Owner(state)
    job = state.write(engine, owner=owner)
    return job, weakref.ref(owner)


def test_a_dropped_job_is_quiet_before_its_memory_goes(disk: Disk, engine: _core.Engine) -> None:
    for seed in range(20):
        job, owner = started(engine, larger_than_staging(seed))
        assert owner() is not None
        del job
        assert owner() is None
        assert 0xFF not in bytes(engine.staging)


def test_cancel_lets_go(disk: Disk, engine: _core.Engine) -> None:
    job, owner = started(engine, larger_than_staging(1))
    job.cancel()
    assert owner() is None
    assert 0xFF not in bytes(engine.staging)


@pytest.mark.parametrize("wait", ["wait_copied", "wait_written"])
def test_a_failed_job_lets_go_when_it_says_so(disk: Disk, engine: _core.Engine, wait: str) -> None:
    job, owner = started(engine, larger_than_staging(2))
    must(not getattr(job, wait)(0))
    assert owner() is not None
    engine.close()
    with pytest.raises(ClosedError):
        getattr(job, wait)(DEADLINE_S)
    assert owner() is None


def test_what_is_copied_is_needed_no_more(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(3, BUFFER))
    image = state.image
    job, owner = started(engine, state)
    must(job.wait_copied(DEADLINE_S))
    assert owner() is None
    job.attach(disk.fs.open_write(disk.path("f"), state.file_bytes))
    must(job.wait_written(DEADLINE_S))
    job.finish()
    assert disk.fs.read_file(disk.path("f"), len(image)) == image


def end_by_wait(job: _core.ReadJob, ready: _core.Ready) -> None:
    job.release(ready)
    must(job.wait(DEADLINE_S))


def end_by_cancel(job: _core.ReadJob, ready: _core.Ready) -> None:
    job.cancel()
    job.release(ready)


@pytest.mark.parametrize("end", [end_by_wait, end_by_cancel])
def test_a_read_keeps_its_destinations(
    disk: Disk, engine: _core.Engine, end: Callable[[_core.ReadJob, _core.Ready], None]
) -> None:
    state = State(random_arrays(4, 1000, 1000), flags={1: EXTERNAL})
    sums = save(engine, disk, "f", state)
    owner = Owner(state.cleared())
    job = state.read(engine, disk.path("f"), sums, owner=owner)
    seen = weakref.ref(owner)
    del owner
    ready = job.next_ready(DEADLINE_S)
    assert ready is not None
    assert seen() is not None
    end(job, ready)
    assert seen() is None


def test_a_read_that_is_dropped_lets_go(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(5, BUFFER, BUFFER))
    sums = save(engine, disk, "f", state)
    owner = Owner(state.cleared())
    job = state.read(engine, disk.path("f"), sums, owner=owner)
    seen = weakref.ref(owner)
    del owner, job
    assert seen() is None


class Cycle:
    """Has arrays, and refers to what refers to it."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.others: list[Any] = []


@pytest.mark.parametrize("seed", range(2))
def test_a_job_in_a_cycle_is_quiet_before_the_cycle_is_cleared(
    disk: Disk, engine: _core.Engine, seed: int
) -> None:
    """The collector clears the objects of a cycle one after the other, in an order of its own. The
    memory of an array is gone with the array, which is no part of the cycle."""
    state = larger_than_staging(seed)
    owner = Cycle([array.view() for array in state.arrays])
    for array, memory in zip(owner.arrays, state.arrays, strict=True):
        weakref.finalize(array, memory.fill, 0xFF)
    owner.others.append(state.write(engine, owner=owner))
    seen = weakref.ref(owner)
    del owner, array
    gc.collect()
    assert seen() is None
    assert state.arrays[0][0] == 0xFF, "the arrays are gone"
    assert 0xFF not in bytes(engine.staging)


def test_a_refused_request_keeps_nothing(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(7, 1000))
    owner = Owner(state)
    seen = weakref.ref(owner)
    with pytest.raises(ValueError, match="block_bytes"):
        state.write(engine, owner=owner, block_bytes=5000)
    del owner
    assert seen() is None
