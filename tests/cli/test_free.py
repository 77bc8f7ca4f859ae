"""statehold free: memory levels give their memory back, and nothing is lost by mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from lineage.test_family import on_storage
from statehold import Checkpointer, Directory, Memory
from statehold.checkpoint.levels.freeing import free, memory_of
from statehold.checkpoint.levels.memory import memory_path
from statehold.cli import levels, main
from statehold.errors import CorruptionError, RunBusyError
from statehold.reading.places import file_system
from statehold.steps.lock import RunLock
from support.faults import DEADLINE_S, SMALL, must
from support.levels import settle
from support.sharing import Tuned

# Holds a lock; ends when the test ends, as an agent also when the lock is wanted, which it can only
# look for.
HOLDER = """
import select, sys
from statehold.steps.lock import RunLock
lock = RunLock(sys.argv[1], yields=sys.argv[2] == "agent")
print("held", flush=True)
while not (sys.argv[2] == "agent" and lock.is_wanted):
    if select.select([sys.stdin], [], [], 0.01)[0]:
        break
lock.release()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save(run: Path, *levels: statehold.Directory | Memory, steps: range = range(1, 4)) -> None:
    with Checkpointer(run, levels=levels or [Memory(), Directory()], **SMALL) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": torch.full((100_000,), step)}).wait("committed", DEADLINE_S)
            settle(ckpt)


def answer(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    out = capsys.readouterr()
    return json.loads(out.out) if out.out else out.err


def test_memory_is_shown_and_then_freed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run)
    memory = Path(memory_path(str(run)))
    document = answer(capsys, "free", run)
    (found,) = document["memory"]
    assert (found["path"], found["steps"], found["used"]) == (str(memory), [2, 3], False)
    assert document["bytes"] == found["bytes"] > 1_600_000
    assert (document["only_here"], document["done"]) == ([], False)
    assert main(["free", str(run)]) == 0
    assert "pass --yes to free it" in capsys.readouterr().out
    assert memory.is_dir()
    assert answer(capsys, "free", run, "--yes")["done"]
    assert not memory.exists()
    with Checkpointer(run, levels=[Memory(), Directory()], **SMALL) as ckpt:
        live = {"w": torch.zeros(100_000, dtype=torch.int64)}
        assert ckpt.restore(live) == 3
        assert live["w"][0] == 3
        ckpt.save(4, live).wait("committed", DEADLINE_S)
    assert main(["free", str(run), "--yes"]) == 0
    assert "freed" in capsys.readouterr().out
    assert main(["free", str(run)]) == 0
    assert "no memory on this host" in capsys.readouterr().out


def test_a_run_whose_directory_was_renamed_keeps_its_steps_in_memory(
    run: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    levels, before = [Memory(), Directory(every=100)], memory_path(str(run))
    with Checkpointer(run, levels=levels, **SMALL) as ckpt:
        for step in (6, 7):
            ckpt.save(step, {"w": step}).wait("committed", DEADLINE_S)
            settle(ckpt)
        shutil.copytree(run, run.parent / "copy")  # as if killed now: step 7 is only in memory
    copy, moved = run.parent / "copy", run.parent / "moved"
    shutil.rmtree(run)
    copy.rename(run)
    assert statehold.open(run).steps() == [6]
    run.rename(moved)
    live = {"w": 0}
    with Checkpointer(moved, levels=levels, **SMALL) as ckpt:
        assert ckpt.restore(live) == 7
        assert f"{moved} was {run} before. Its memory level stays in {before}" in caplog.text
        ckpt.save(8, live).wait("committed", DEADLINE_S)
    shutil.copytree(moved, run.parent / "child")
    with Checkpointer(run.parent / "child", levels=levels, **SMALL) as ckpt:
        assert ckpt.steps() == [6, 8]  # those of its directory: the memory is that of the other run
    found = answer(capsys, "free", moved, "--yes")["memory"]
    assert [each["path"] for each in found] == [before]
    assert not Path(before).exists()


@pytest.mark.usefixtures("small_shared_files")
def test_files_that_steps_share_are_freed_once(
    run: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tuned()
    levels = [Memory(path=memory, agent=False, keep=4), Directory()]
    with Checkpointer(run, levels=levels, **SMALL) as ckpt:
        for step in range(1, 5):
            ckpt.gate()
            model.train_once()
            ckpt.save(step, {"m": model}).wait("committed", DEADLINE_S)
            settle(ckpt)
    alone = on_storage(memory)
    document = answer(capsys, "free", run)
    assert document["memory"][0]["steps"] == [1, 2, 3, 4]
    assert document["bytes"] == document["memory"][0]["bytes"] == alone
    assert main(["copy", f"{memory}@4", str(memory.with_name("kept"))]) == 0
    kept = sum(each.stat().st_size for each in memory.glob("*04/*") if each.stat().st_nlink > 1)
    document = answer(capsys, "free", run, "--yes")
    assert 0 < document["bytes"] == alone - kept, "another run in memory holds the last step"


def test_the_memory_of_a_run_that_is_gone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run)
    shutil.rmtree(run)
    assert "newer than all" in answer(capsys, "free", run, "--yes", code=2)
    assert answer(capsys, "free", memory_path(str(run)))["newer"] == [2, 3]
    assert answer(capsys, "free", run, "--yes", "--force")["newer"] == [2, 3]
    assert not Path(memory_path(str(run))).exists()
    assert "no such run" in answer(capsys, "free", run, code=3)


def test_a_step_that_is_nowhere_else_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, Memory(), Directory(every=100))
    with Checkpointer(run, levels=[Memory()], **SMALL) as ckpt:
        ckpt.save(9, {"w": torch.zeros(3)})
    text = answer(capsys, "free", run, "--yes", code=2)
    assert "newer than all steps elsewhere" in text
    assert "steps   9" in text
    memory = memory_path(str(run))
    assert main(["copy", f"{memory}@9", str(run)]) == 0  # as the hint says
    assert answer(capsys, "free", run, "--yes")["done"]
    assert statehold.open(run).steps()[-1] == 9


def test_another_save_of_a_step_is_not_elsewhere(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of step 3, the second save is in memory alone."""
    save(run)
    with Checkpointer(run, levels=[Memory()], **SMALL) as ckpt:
        ckpt.save(3, {"w": torch.zeros(3)}).wait("committed", DEADLINE_S)
    document = answer(capsys, "free", run)
    assert (document["only_here"], document["newer"]) == ([3], [3])
    assert "steps   3" in answer(capsys, "free", run, "--yes", code=2)
    kept = statehold.load(f"{memory_path(str(run))}@3")
    assert kept["w"].tolist() == [0, 0, 0]


def test_free_looks_under_its_lock(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run)
    looked = []

    def look(*words: Any, **options: Any) -> list[levels.FoundLevel]:
        with pytest.raises(RunBusyError) as refused:
            RunLock(memory_path(str(run)), yields=True)
        looked.append(refused.value.passes)
        return levels_of(*words, **options)

    levels_of = levels.levels_of
    monkeypatch.setattr(levels, "levels_of", look)
    assert answer(capsys, "free", run, "--yes")["done"]
    assert looked == [True]


def test_an_older_step_that_is_nowhere_else_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = statehold.Keep(last=2, best=1, metric="loss")
    with Checkpointer(run, levels=[Memory(keep=best), Directory(keep=1)], **SMALL) as ckpt:
        for step, loss in {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.8}.items():
            state = {"w": torch.zeros(3)}
            ckpt.save(step, state, metrics={"loss": loss}).wait("committed", DEADLINE_S)
            settle(ckpt)
    document = answer(capsys, "free", run)
    assert (document["only_here"], document["newer"]) == ([2, 3], [])
    assert main(["free", str(run)]) == 0
    assert "nowhere else: 2, 3" in capsys.readouterr().out


def test_a_level_at_a_path_is_found_by_the_note(
    run: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, Memory(path=memory), Directory())
    assert [each["path"] for each in answer(capsys, "free", run)["memory"]] == [str(memory)]
    (memory / "notes.txt").write_text("mine")
    assert answer(capsys, "free", run, "--yes")["done"]
    assert [each.name for each in memory.iterdir()] == ["notes.txt"]


def test_what_is_not_memory_of_this_user_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    save(run, Memory(path=disk), Directory())
    assert answer(capsys, "free", run)["memory"] == []
    (run / "levels.json").write_text("{}")
    with pytest.raises(CorruptionError):
        memory_of(str(run))
    assert main(["free", str(run), "--yes", "--force"]) == 1
    assert (disk / "step-000000000003").is_dir()


@pytest.mark.parametrize("who", ["agent", "job"])
def test_memory_in_use_is_refused(run: Path, who: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(run)
    memory = memory_path(str(run))
    command = [sys.executable, "-c", HOLDER, memory, who]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            must(holder.stdout is not None and holder.stdout.readline() == b"held\n")
            assert answer(capsys, "free", run)["memory"][0]["used"]
            words = {"agent": "an agent is at work", "job": "already saving"}[who]
            assert words in answer(capsys, "free", run, "--yes", code=4)
            assert Path(memory).is_dir()
            assert holder.poll() is None
            if who == "agent":
                freed = answer(capsys, "free", run, "--yes", "--force")
                assert freed["done"]
                ended = holder.wait(DEADLINE_S)
                assert ended == 0
            else:
                assert "already saving" in answer(capsys, "free", run, "--yes", "--force", code=4)
            assert Path(memory).is_dir() == (who == "job")
        finally:
            holder.kill()


def test_leftovers_and_steps_set_aside_are_freed_too(memory: Path) -> None:
    for name in (".spare", ".ready", ".shared", "step-000000000003.corrupt",
                 "step-000000000004.5f3a09c1-7.copy-0123456789abcdef.partial"):  # fmt: skip
        (memory / name).mkdir(parents=True)
        (memory / name / "data").write_bytes(b"x")
    free(file_system(), str(memory))
    assert not memory.exists()
