"""What dead jobs have left in a run that shares files: what it takes, and what its end frees."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Asked
from lineage.test_family import on_storage
from statehold.steps.lock import RunLock
from support import scripts
from support.faults import must

TESTS = Path(__file__).parents[1]

# Dies in step 4, between the links to the shared files and the manifest.
VICTIM = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import statehold
from support.faults import DEADLINE_S, SMALL, spy_on
from support.sharing import Tuned, small_files
def die(operation, args):
    if operation == "write_file" and "000004" in args[0]:
        os.kill(os.getpid(), signal.SIGKILL)
with small_files():
    ckpt, model = statehold.Checkpointer(sys.argv[1], **SMALL), Tuned()
    for step in range(1, 5):
        if step == 4:
            spy_on(ckpt, die)
        ckpt.gate()
        model.train_once()
        ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
"""


def leave(run: Path, name: str, own_bytes: int, *shared: Path) -> Path:
    """A leftover with a file of its own, and second names of other files."""
    folder = run / name
    folder.mkdir()
    (folder / "own").write_bytes(bytes(own_bytes))
    for index, each in enumerate(shared):
        os.link(each, folder / f"shared-{index}")
    return folder


def data_of(run: Path, step: int) -> Path:
    (found,) = (run / f"step-{step:012d}").glob("*.safetensors")
    return found


def pruned(run: Path, ask: Asked, *words: object) -> tuple[Any, int]:
    """What prune says, before and after, and how many bytes the run gets smaller."""
    plan = ask("prune", run, *words)[1]
    RunLock(str(run)).release()  # its file is there before
    before = on_storage(run)
    document = ask("prune", run, *words, "--yes")[1]
    assert {**plan, "done": True} == document
    return document, before - on_storage(run)


def half_steps(ask: Asked, run: Path) -> str:
    (found,) = [each for each in ask("doctor", run)[1]["checks"] if each["name"] == "half steps"]
    return str(found["value"])


def test_bytes_of_steps_that_stay_are_not_freed(run: Path, ask: Asked) -> None:
    leave(run, "step-000000000003.partial", 100, data_of(run, 2))
    leave(run, "step-000000000000.corrupt", 10, data_of(run, 2))
    assert half_steps(ask, run) == "1, 100 B"
    others = {each["name"]: each["bytes"] for each in ask("ls", run)[1]["other"]}
    assert others == {"step-000000000003.partial": 100, "step-000000000000.corrupt": 10}
    document, freed = pruned(run, ask, "--keep", 2, "--leftovers")
    assert [each["bytes"] for each in document["leftovers"]] == [100]
    assert document["bytes"] == freed == 100


def test_what_two_leftovers_share_is_freed_once(run: Path, ask: Asked) -> None:
    first = leave(run, "step-000000000003.partial", 1000)
    leave(run, "step-000000000004.partial", 20, first / "own")
    assert half_steps(ask, run) == "2, 1020 B"
    document, freed = pruned(run, ask, "--keep", 2, "--leftovers")
    assert [each["bytes"] for each in document["leftovers"]] == [0, 20]
    assert document["bytes"] == freed == 1020


@pytest.mark.parametrize("leftovers", [[], ["--leftovers"]])
def test_what_a_step_and_a_leftover_share(run: Path, leftovers: list[str], ask: Asked) -> None:
    leave(run, "step-000000000003.partial", 20, data_of(run, 1))
    document, freed = pruned(run, ask, "--keep", 1, *leftovers)
    assert document["bytes"] == freed > 0


def test_a_killed_job_has_left_what_it_frees(tmp_path: Path, ask: Asked) -> None:
    run = tmp_path / "run"
    died = scripts.run(["-c", VICTIM, run, TESTS])
    must(died.returncode == -signal.SIGKILL, died.stderr)
    partial = run / "step-000000000004.partial"
    must(any(each.stat().st_nlink > 1 for each in partial.iterdir()))
    document, freed = pruned(run, ask, "--keep", 1, "--leftovers")
    assert document["bytes"] == freed > 0
    assert [each["kind"] for each in document["leftovers"]] == ["shared", "partial"]
    assert [each.name for each in run.glob("step-*")] == ["step-000000000003"]


def test_names_of_shared_files_are_leftovers(run: Path, ask: Asked) -> None:
    leave(run, ".shared", 100, data_of(run, 2))
    partial = leave(run, "step-000000000003.partial", 10, run / ".shared" / "own")
    kinds = {each["name"]: (each["kind"], each["bytes"]) for each in ask("ls", run)[1]["other"]}
    assert kinds == {".shared": ("shared", 0), partial.name: ("partial", 110)}
    document, freed = pruned(run, ask, "--keep", 2, "--leftovers")
    assert [each["name"] for each in document["leftovers"]] == [".shared", partial.name]
    assert document["bytes"] == freed == 110
    assert not (run / ".shared").exists()


def test_names_of_shared_files_that_stay_keep_their_bytes(run: Path, ask: Asked) -> None:
    leave(run, ".shared", 0, data_of(run, 1))
    data_bytes = data_of(run, 1).stat().st_size
    plan = ask("prune", run, "--keep", 1, "--leftovers")[1]
    document, freed = pruned(run, ask, "--keep", 1)
    assert document["bytes"] == document["retire"][0]["bytes"] == freed > 0
    assert plan["bytes"] == freed + data_bytes
    assert plan["retire"][0]["bytes"] == plan["bytes"]
    document, freed = pruned(run, ask, "--keep", 1, "--leftovers")
    assert document["bytes"] == freed == data_bytes


def test_doctor_lists_names_of_shared_files(run: Path, ask: Asked) -> None:
    def told() -> list[tuple[str, bool | None]]:
        checks = ask("doctor", run)[1]["checks"]
        return [(each["value"], each["ok"]) for each in checks if each["name"] == "shared files"]

    assert told() == []
    leave(run, ".shared", 100, data_of(run, 2))
    assert told() == [("1, 100 B", None)]
    lock = RunLock(str(run))
    assert told() == [("1, 100 B", True)]
    lock.release()


def test_a_job_at_work_has_no_leftovers(run: Path, ask: Asked) -> None:
    for name in (".shared", "step-000000000003.partial"):
        leave(run, name, 10)
    lock = RunLock(str(run))
    try:
        assert ask("prune", run, "--keep", 2, "--leftovers")[1]["leftovers"] == []
        code, _ = ask("prune", run, "--keep", 2, "--leftovers", "--yes")
    finally:
        lock.release()
    assert code == 4
    assert (run / ".shared" / "own").exists()
    assert len(ask("prune", run, "--keep", 2, "--leftovers")[1]["leftovers"]) == 2


def test_what_the_end_of_a_copy_will_clear_is_not_listed(run: Path, ask: Asked) -> None:
    copy = leave(run, "step-000000000004.5f3a09c1-7.copy-0123456789abcdef.partial", 10)
    document, freed = pruned(run, ask, "--keep", 2, "--leftovers")
    assert (document["leftovers"], freed) == ([], 0)
    assert copy.exists()
