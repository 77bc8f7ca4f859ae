"""What doctor says of what dead jobs have left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import statehold
from cli.conftest import Asked
from statehold.cli.doctor import Check, left_behind
from statehold.reading.places import file_system
from statehold.steps.lock import RunLock, is_saved_into
from support.faults import SMALL
from support.levels import save


def found(path: Path, shared: Path) -> dict[str, Check]:
    return {left.name: left for left in left_behind(file_system(), str(path), str(shared))}


def test_a_clean_place_has_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save(ckpt, 1, {"w": torch.ones(3)})
    assert found(run, tmp_path / "shared") == {}


def test_what_lies_there_is_told_of(tmp_path: Path) -> None:
    run, shared = tmp_path / "run", tmp_path / "shared"
    for name in ("step-000000000007.5f3a09c1-7.partial", "step-000000000003.corrupt"):
        (run / name).mkdir(parents=True)
        (run / name / "data").write_bytes(bytes(1000))
    (run / ".agent.log").write_text("one\ntwo\x1b[2J\n")
    memory = shared / f"statehold-{os.getuid()}" / "0123456789abcdef"
    memory.mkdir(parents=True)
    (memory / "data").write_bytes(bytes(2048))
    os.link(memory / "data", memory / "again")
    near = shared / ".statehold-fetched-x"
    near.mkdir()
    (near / "data").write_bytes(bytes(10))
    os.link(near / "data", near / "again")
    told = found(run, shared)
    names = {"memory of runs", "brought near", "half steps", "set aside", "agent's log"}
    assert told.keys() == names
    assert told["memory of runs"].value == "1 run, 0 in use, 2 KiB", "a file counts once"
    assert told["brought near"].value.startswith("10 B in ")
    assert told["half steps"].value == "1, 1000 B"
    assert told["half steps"].ok is None
    assert told["agent's log"].value.startswith("two")
    lock = RunLock(str(memory))
    assert found(run, shared)["memory of runs"].value.startswith("1 run, 1 in use")
    lock.release()


def test_links_are_not_followed(tmp_path: Path) -> None:
    run, shared = tmp_path / "run", tmp_path / "shared"
    run.mkdir()
    shared.mkdir()
    (tmp_path / "log").write_text("secret\n")
    (run / ".agent.log").symlink_to(tmp_path / "log")
    (shared / f"statehold-{os.getuid()}").mkdir()
    (shared / f"statehold-{os.getuid()}" / "link").symlink_to("/")
    (shared / ".statehold-fetched-link").symlink_to("/")
    assert found(run, shared) == {}


def test_asking_does_not_give_a_lock_up(tmp_path: Path) -> None:
    assert not is_saved_into(str(tmp_path))
    lock = RunLock(str(tmp_path))
    assert is_saved_into(str(tmp_path))
    child = os.fork()
    if not child:  # which does not have the lock, and asks the kernel
        os._exit(0 if is_saved_into(str(tmp_path)) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    lock.release()
    assert not is_saved_into(str(tmp_path))


def test_doctor_tells_it(tmp_path: Path, ask: Asked) -> None:
    (tmp_path / "step-000000000007.partial").mkdir()
    code, document = ask("doctor", tmp_path)
    assert code == 0
    (half,) = [each for each in document["checks"] if each["name"] == "half steps"]
    assert half["ok"] is None
