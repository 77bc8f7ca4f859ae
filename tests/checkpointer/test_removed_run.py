"""A run directory that is removed under a job, and what jobs with other levels have left in one."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import statehold
from statehold import Directory
from statehold.errors import RunBusyError, StorageError
from statehold.steps.lock import RunLock, is_saved_into
from support.faults import DEADLINE_S, SMALL, small
from support.in_memory import SimFs
from support.inside import end, promoter
from support.levels import FAR, LATER, only, opened_on, save, settle


def content(step: int) -> dict[str, object]:
    return {"w": torch.full((100_000,), step, dtype=torch.int32)}


def test_saves_go_on_after_the_run_directory_was_removed(tmp_path: Path, caplog) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, content(step))
        settle(ckpt)
        shutil.rmtree(run)
        for step in (4, 5, 6):
            save(ckpt, step, content(step))
        with pytest.raises(RunBusyError):
            RunLock(str(run))
        assert is_saved_into(str(run))
        live = content(0)
        got = ckpt.restore(live)
        assert (got, live["w"].min()) == (6, 6)  # type: ignore[attr-defined]
    assert caplog.text.count("was removed; creating and locking it again") == 1


# Makes and locks a run directory, says so, and keeps it until the test ends it.
OTHER_JOB = """
import os, sys
from statehold.steps.lock import RunLock
os.mkdir(sys.argv[1])
lock = RunLock(sys.argv[1])
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_run_directory_that_another_job_has_made_meanwhile_is_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save(ckpt, 1, content(1))
        settle(ckpt)
        shutil.rmtree(run)
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER_JOB, str(run)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert other.stdout is not None
            said = other.stdout.readline()
            assert said == "locked\n"
            with pytest.raises(RunBusyError, match=f"process {other.pid}"):
                save(ckpt, 2, content(2))
            assert os.listdir(run) == [".lock"]
        finally:
            other.communicate("\n", timeout=DEADLINE_S)
        save(ckpt, 3, content(3))
        steps = ckpt.steps()
        assert steps == [3]


@pytest.mark.thorough
@pytest.mark.parametrize("removed", ["near", "run", "far"])
def test_a_level_that_was_removed_is_taken_again_by_its_run(tmp_path: Path, removed: str) -> None:
    places = {name: tmp_path / name for name in ("near", "run", "far")}

    def saved(ckpt: statehold.Checkpointer, step: int) -> None:
        save(ckpt, step, content(step))
        ckpt.flush(DEADLINE_S)
        found = [(each.newest, each.error) for each in ckpt.levels()]
        assert found == [(step, None)] * 3

    def opened() -> statehold.Checkpointer:
        levels = [
            Directory(path=places["near"], name="near"),
            Directory(),
            Directory(path=places["far"], name="far"),
        ]
        return statehold.Checkpointer(places["run"], levels=levels, **SMALL)

    with opened() as ckpt:
        saved(ckpt, 1)
        notes = {path: path.read_bytes() for path in places["run"].glob("*.json")}
        assert len(notes) == 2
        shutil.rmtree(places[removed])
        saved(ckpt, 2)
        assert {path: path.read_bytes() for path in notes} == notes
    with opened() as ckpt:
        got = ckpt.restore(content(0))
        assert got == 2
        saved(ckpt, 3)


def test_a_run_whose_directory_was_removed_is_no_other_run_to_its_far_level(
    tmp_path: Path,
) -> None:
    levels = [Directory(), Directory(path=tmp_path / "far", name="far")]
    for step in (1, 3):
        with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
            ckpt.restore(content(0))
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
            shutil.rmtree(tmp_path / "run")
            save(ckpt, step + 1, content(step + 1))
            ckpt.flush(DEADLINE_S)
            found = [(each.newest, each.error) for each in ckpt.levels()]
            assert found == [(step + 1, None)] * 2


def test_a_forgotten_restore_after_the_run_directory_was_removed_is_asked_for(
    tmp_path: Path,
) -> None:
    levels = [Directory(path=tmp_path / "near", name="near"), Directory()]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        save(ckpt, 1, content(1))
    shutil.rmtree(tmp_path / "run")
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        with pytest.raises(RunBusyError, match=r"restore\(state\) before the first save"):
            save(ckpt, 1, content(1))
        got = ckpt.restore(content(0))
        assert got == 1
        save(ckpt, 2, content(2))
        steps = ckpt.steps()
        assert steps == [1, 2]


def test_copies_that_were_interrupted_go_when_nothing_is_copied_there_any_more() -> None:
    fs = SimFs(seed=1)
    with opened_on(fs, far=LATER) as ckpt:
        place = promoter(ckpt).place
        commit = place.commit

        def fail(*_: object) -> None:
            raise StorageError("away", errno=5)

        place.commit = fail  # type: ignore[method-assign]
        save(ckpt, 1, content(1))
        settle(ckpt)
        halves = [name for name, _ in fs.listdir(FAR) if ".copy-" in name]
        assert len(halves) == 1
        place.commit = commit  # type: ignore[method-assign]
        end(ckpt, flush=False)
    with only(fs, FAR) as ckpt:
        steps = ckpt.steps()
        assert steps == []  # a reader changes nothing
        assert [name for name, _ in fs.listdir(FAR) if ".copy-" in name] == halves
        save(ckpt, 2, content(2))
        assert [name for name, _ in fs.listdir(FAR) if "partial" in name] == []
        steps = ckpt.steps()
        assert steps == [2]


@pytest.mark.parametrize("backend", ["threads", None])
def test_threads_that_were_chosen_are_no_news(tmp_path: Path, caplog, backend: str | None) -> None:
    with (
        caplog.at_level(logging.INFO, "statehold"),
        statehold.Checkpointer(tmp_path / "run", **small(backend=backend, profile=None)) as ckpt,
    ):
        is_fallback = backend is None and ckpt.backend == "threads"
    assert ("saving with threads instead of io_uring" in caplog.text) == is_fallback
