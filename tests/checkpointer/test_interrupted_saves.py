"""Ctrl-C, or an error, anywhere in save(): the job ends before its memory, and the run goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import Memory, errors
from statehold.checkpoint.save import call, pipeline, writes
from support.faults import DEADLINE_S, SMALL, small
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.interrupts import Interrupts

FUNCTIONS: list[Callable[..., Any]] = [
    call.Saver._begin,
    call.Saver._start,
    writes.start_write,
    pipeline.Pipeline.submit,
    call.Saver.ready_file,
]
TESTS = Path(__file__).parents[1]
# Larger than the staging memory: no copy ends before the file is attached.
STATE_BYTES = 3 << 20


class WatchedJob:
    """A job that the product alone keeps alive."""

    def __init__(self, job: Any, seen: list[str]) -> None:
        self._job, self._seen = job, seen

    def __getattr__(self, name: str) -> Any:
        if name == "cancel":
            self._seen.append("cancelled")
        return getattr(self._job, name)

    def __del__(self) -> None:
        self._seen.append("dropped")


def memory_freed(job: weakref.ref[WatchedJob], seen: list[str]) -> None:
    found = job()
    try:
        is_over = found is None or found._job.wait_copied(0)
    except errors.StateholdError:  # it has failed, and touches nothing any more
        is_over = True
    seen.append("freed" if is_over else "freed too early")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What has happened to each job, in order; with the memory that it copies from."""
    found: list[list[str]] = []

    def start_write(engine: Any, plan: Any, ordered: Any, file: Any = None) -> WatchedJob:
        seen: list[str] = []
        found.append(seen)
        watched = WatchedJob(writes.start_write(engine, plan, ordered, file), seen)
        for each in ordered.tensors:
            weakref.finalize(each.storage, memory_freed, weakref.ref(watched), seen)
        return watched

    monkeypatch.setattr(call, "start_write", start_write)
    return found


def interrupted(ckpt: statehold.Checkpointer, step: int, at: int) -> tuple[str | None, bool]:
    """Where a save was interrupted, None if it was not; and whether save() returned."""
    state = {"a": torch.ones(STATE_BYTES, dtype=torch.uint8).numpy(), "step": step}
    interrupts = Interrupts(FUNCTIONS, at)
    with interrupts.armed():
        try:
            ckpt.save(step, state)
        except KeyboardInterrupt:
            return interrupts.fired, False
    return interrupts.fired, True


def check_goes_on(ckpt: statehold.Checkpointer, seen: list[str]) -> None:
    """Nothing waits for what was interrupted, nothing of it is left, no memory went too early."""
    ckpt.gate(DEADLINE_S)
    inside(ckpt).pipeline.drain(DEADLINE_S)
    assert not inside(ckpt).pipeline.to_stage
    assert "freed too early" not in seen


# Every bytecode takes a minute: the suite takes a sample.
EACH = int(os.environ.get("STATEHOLD_INTERRUPT_EACH", "7"))


def test_ctrl_c_at_every_bytecode(jobs: list[list[str]]) -> None:
    fs, places = SimFs(seed=1), set()
    with checkpointer_on(fs, "/run", keep=1, **SMALL) as ckpt:
        at, newest = 0, 0
        while True:
            jobs.clear()
            where, returned = interrupted(ckpt, newest + 1, at)
            if where is None:
                break
            places.add(where.partition(",")[0])
            assert not returned, where
            check_goes_on(ckpt, jobs[-1] if jobs else [])
            steps = ckpt.steps()
            assert steps in ([newest] if newest else [], [newest + 1]), where
            newest = max(steps, default=0)
            names = {name for name, _ in fs.listdir("/run")} if fs.is_dir("/run") else set()
            assert not [name for name in names if name.endswith(".partial")], where
            at += EACH
        ckpt.save(newest + 2, {"x": 1}).wait("committed", DEADLINE_S)
    assert places >= {"_begin", "_start", "start_write", "submit"}


def test_ctrl_c_where_the_file_is_memory_that_waits(
    jobs: list[list[str]], tmp_path: Path, memory: Path
) -> None:
    options = small(profile=None)
    with statehold.Checkpointer(
        tmp_path / "run", levels=[Memory(keep=1, path=memory)], **options
    ) as ckpt:
        for newest in (1, 2, 3):
            assert interrupted(ckpt, newest, 1 << 30) == (None, True)
            inside(ckpt).pipeline.drain(DEADLINE_S)
        places, at = set(), 0
        while True:
            jobs.clear()
            where, _ = interrupted(ckpt, newest + 1, at)
            if where is None:
                break
            places.add(where.partition(",")[0])
            check_goes_on(ckpt, jobs[-1] if jobs else [])
            newest = max(ckpt.steps())
            at += 3 * EACH
            for _ in range(2):  # so that a file waits to be overwritten
                newest += 1
                ckpt.save(newest, {"a": torch.ones(STATE_BYTES, dtype=torch.uint8).numpy()})
                inside(ckpt).pipeline.drain(DEADLINE_S)
        inside(ckpt).pipeline.drain(DEADLINE_S)
        assert "ready_file" in places
        assert not list(memory.rglob("*.partial"))


@pytest.mark.parametrize("error", [RuntimeError("a device error"), KeyboardInterrupt()])
def test_an_error_after_the_start_of_the_job(
    run: Path, error: BaseException, jobs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []

    def boom(*_: Any) -> None:
        fired.append(True)
        raise error

    with statehold.Checkpointer(run, **SMALL) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(inside(ckpt).pipeline, "submit", boom)
            with pytest.raises(type(error)) as caught:
                ckpt.save(1, {"a": torch.ones(STATE_BYTES, dtype=torch.uint8).numpy()})
        assert fired
        # The traceback, which is kept, still has the memory; the job is over all the same.
        assert jobs[-1] == ["cancelled"]
        del caught
        check_goes_on(ckpt, jobs[-1])
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [1]


def test_an_error_while_a_restore_begins_to_read_stops_the_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"x": torch.ones(STATE_BYTES)}).wait("committed", DEADLINE_S)
        live, jobs = {"x": torch.zeros(STATE_BYTES)}, []

        def reading(step: int, job: Any) -> None:
            jobs.append(job)
            raise errors.storage_error("start a thread", errno.EAGAIN, "")

        from statehold.checkpoint.telemetry.watch import RestoreWatch

        with monkeypatch.context() as patched:
            patched.setattr(RestoreWatch, "reading", lambda self, step, job: reading(step, job))
            with pytest.raises(errors.StorageError):
                ckpt.restore(live)
        with pytest.raises(errors.ClosedError):
            jobs[0].wait(None)
        assert ckpt.restore(live) == 1
        assert torch.equal(live["x"], torch.ones(STATE_BYTES))


@pytest.mark.thorough
def test_ctrl_c_in_a_lock_of_the_standard_library(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "support.interrupted_conditions", str(tmp_path / "run")],
        cwd=TESTS, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
