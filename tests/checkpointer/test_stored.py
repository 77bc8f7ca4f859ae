"""State that lies in files is saved by second names for these files, and read like any other."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import _core
from statehold.checkpoint.save import pipeline
from statehold.checkpoint.save.handle import Passage
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.cli import main
from statehold.errors import InvariantError, StateholdError, StorageError, UnsupportedValueError
from statehold.layout.stored import StoredFile
from support.disks import open_or_skip
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.stored import OnFiles

CUTS = (
    [("avg", 0, 1000), ("square", 0, 1024)],
    [("avg", 1000, 4000), ("square", 1024, 1056)],
    [("square", 1056, 2048)],
)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "avg": torch.arange(4000, dtype=torch.float32).reshape(40, 100),
        "square": torch.arange(2048, dtype=torch.float32).reshape(2, 32, 32),
    }


@pytest.fixture(params=["io_uring", "threads", "sim"])
def fs(request: pytest.FixtureRequest) -> Iterator[Any]:
    fs = SimFs(seed=1) if request.param == "sim" else open_or_skip(request.param)
    yield fs
    fs.close()


@pytest.fixture
def root(fs: Any, tmp_path: Path) -> str:
    return "" if fs.backend == "sim" else str(tmp_path)


@pytest.fixture
def stored(fs: Any, root: str) -> Iterator[OnFiles]:
    stored = OnFiles(fs, f"{root}/opt", tensors(), CUTS)
    yield stored
    stored.close()


def state_of(stored: OnFiles) -> dict[str, Any]:
    return {"optimizer": stored, "weight": torch.full((300,), stored.value)}


def blank() -> dict[str, Any]:
    moments = {name: torch.zeros_like(each) for name, each in tensors().items()}
    return {"optimizer": {"moments": moments, "value": -1.0}, "weight": torch.zeros(300)}


def check(ckpt: statehold.Checkpointer, step: int, value: float) -> None:
    found = blank()
    assert ckpt.restore(found, step=step) == step
    for name, tensor in tensors().items():
        assert torch.equal(found["optimizer"]["moments"][name], tensor + value)
    assert found["optimizer"]["value"] == value
    assert torch.equal(found["weight"], torch.full((300,), value))


def save(ckpt: statehold.Checkpointer, step: int, stored: OnFiles) -> statehold.Save:
    """Save, and return when all that follows the commit, or the failure, is done."""
    try:
        return ckpt.save(step, state_of(stored)).wait("committed", DEADLINE_S)
    finally:
        inside(ckpt).pipeline.drain(DEADLINE_S)


def test_the_object_itself_takes_its_state_back(fs: Any, root: str, stored: OnFiles) -> None:
    with checkpointer_on(fs, f"{root}/run", **SMALL) as ckpt:
        save(ckpt, 1, stored)
        stored.update(1.0)
        assert ckpt.restore(state_of(stored)) == 1
    for name, tensor in tensors().items():
        assert torch.equal(stored.tensors[name], tensor)
    assert stored.value == 0.0


def test_steps_hold_the_files_themselves(fs: Any, root: str, stored: OnFiles) -> None:
    run = f"{root}/run"
    with checkpointer_on(fs, run, **SMALL) as ckpt:
        for step in (1, 2, 3):
            done = save(ckpt, step, stored)
            size = sum(file.file_bytes for file in stored.files)
            assert (done.stats.files, done.stats.linked_bytes) == (4, size)
            assert done.stats.written_bytes < 8192
            stored.update(1.0)
        assert (stored.released, stored.held, stored.reused) == (3, [], 0)
        for step in (1, 2, 3):
            check(ckpt, step, step - 1.0)
    if fs.backend != "sim":
        for part in (1, 2, 3):
            name = f"{run}/step-{1:012d}/rank-00000-of-00001-{part}.safetensors"
            assert os.stat(name).st_nlink == 2
        assert main(["verify", run]) == 0


def test_commands_see_an_ordinary_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fs = _core.open_fs("threads")
    stored = OnFiles(fs, str(tmp_path / "opt"), tensors(), CUTS)
    run = str(tmp_path / "run")
    with checkpointer_on(fs, run, **SMALL) as ckpt:
        save(ckpt, 1, stored)
        stored.update(1.0)
        save(ckpt, 2, stored)
    capsys.readouterr()
    assert main(["show", "--json", f"{run}/step-{2:012d}", "square"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["chunks"]) == 3
    assert shown["statistics"]["max"] == 2048.0
    assert main(["diff", "--json", f"{run}/step-{1:012d}", f"{run}/step-{2:012d}"]) == 1
    differing = {each["name"]: each for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert differing["avg"]["differing"] == 4000
    assert differing["square"]["max_abs"] == 1.0
    stored.close()
    fs.close()


def test_files_of_retired_steps_are_reused_only_when_nobody_links_them(
    fs: Any, root: str, stored: OnFiles
) -> None:
    with checkpointer_on(fs, f"{root}/run", keep=2, **SMALL) as ckpt:
        for step in range(1, 9):
            save(ckpt, step, stored)
            stored.update(1.0)
            for kept in ckpt.steps():
                check(ckpt, kept, kept - 1.0)
        assert stored.reused > 0
        assert stored.made < 8 * len(CUTS)


@pytest.mark.parametrize(
    "error", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS]
)
def test_files_that_cannot_be_linked_are_copied(
    error: int, caplog: pytest.LogCaptureFixture
) -> None:
    fs = SimFs(seed=1)
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        fs.fail_next("link", error, 2, 0)
        with caplog.at_level(logging.WARNING, "statehold"):
            done = save(ckpt, 1, stored)
            ckpt.flush()
        assert fs.fired["injected link"] == 2
        copied = sum(file.file_bytes for file in stored.files[:2])
        assert done.stats.linked_bytes == stored.files[2].file_bytes
        assert done.stats.written_bytes > copied
        fs.fail_next("link", error, 3, 0)
        save(ckpt, 2, stored)
        ckpt.flush()
        assert fs.fired["injected link"] == 5
        (record,) = caplog.records
        assert "files of an optimizer in /opt, because" in record.getMessage()
        assert "put this Path on the file system of the run" in record.getMessage()
        for step in (1, 2):
            check(ckpt, step, 0.0)
    stored.close()
    fs.close()


def test_a_damaged_file_is_not_copied() -> None:
    fs = SimFs(seed=1)
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    fs.corrupt(stored.files[0].path, 5000, 1)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        fs.fail_next("link", errno.EXDEV, 1, 0)
        with pytest.raises(statehold.errors.ChecksumError):
            save(ckpt, 1, stored)
        assert (ckpt.steps(), stored.released) == ([], 1)
    stored.close()
    fs.close()


@pytest.mark.parametrize("operation", ["link", "open_read", "sync"])
def test_an_error_fails_the_save_and_gives_the_files_back(operation: str) -> None:
    fs = SimFs(seed=1)
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        save(ckpt, 1, stored)
        stored.update(1.0)
        fs.fail_next(operation, errno.EIO, 1, 1)
        with pytest.raises(StorageError):
            save(ckpt, 2, stored)
        assert fs.fired[f"injected {operation}"] == 1
        assert (ckpt.steps(), stored.released, stored.held) == ([1], 2, [])
        check(ckpt, 1, 0.0)
        save(ckpt, 3, stored)
        check(ckpt, 3, 1.0)
    stored.close()
    fs.close()


def test_a_save_that_cannot_begin_gives_the_files_back() -> None:
    fs = SimFs(seed=1)
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        with pytest.raises(UnsupportedValueError):
            ckpt.save(1, {"optimizer": stored, "bad": object()})
        inside(ckpt).pipeline.drain(DEADLINE_S)
        assert (stored.released, stored.held) == (1, [])
    stored.close()
    fs.close()


def changed(files: list[StoredFile], index: int, **how: Any) -> list[StoredFile]:
    return [*files[:index], replace(files[index], **how), *files[index + 1 :]]


LIES = {
    "a file is missing": lambda files: files[:2],
    "a file twice": lambda files: [*files, files[0]],
    "a hole": lambda files: changed(files, 0, begins=(4096, 8200, 12192)),
    "too short": lambda files: changed(files, 0, file_bytes=files[0].file_bytes - 1),
    "no checksums": lambda files: changed(files, 1, sums=b""),
    "data within a page": lambda files: changed(files, 1, data_begin=4097),
    "another dtype": lambda files: changed(
        files, 2, specs=(files[2].specs[0]._replace(dtype="I32"), *files[2].specs[1:])
    ),
    "another name": lambda files: changed(
        files, 2, specs=(files[2].specs[0]._replace(name="weight"), *files[2].specs[1:])
    ),
    "nothing": lambda files: [],
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_are_not_what_the_state_says_are_refused(lie: str) -> None:
    fs = SimFs(seed=1)
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    true = stored.files
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        stored.files = LIES[lie](true)
        with pytest.raises(InvariantError):
            save(ckpt, 1, stored)
        assert ckpt.steps() == []
        stored.files = true
        save(ckpt, 2, stored)
        check(ckpt, 2, 0.0)
    stored.close()
    fs.close()


def test_a_lie_is_the_cause_where_another_thread_fails_before_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_stopped, has_failed = threading.Event(), threading.Event()
    stage, fail, give_back = vars(Pipeline)["_stage"], Passage.fail, pipeline.give_back

    def staging(self: Pipeline, *args: Any, **options: Any) -> None:
        must(is_stopped.wait(DEADLINE_S))
        stage(self, *args, **options)

    def failing(self: Passage, error: StateholdError) -> None:
        fail(self, error)
        has_failed.set()

    def giving_back(file: _core.File) -> None:
        is_stopped.set()
        must(has_failed.wait(DEADLINE_S))
        give_back(file)

    monkeypatch.setattr(pipeline, "give_back", giving_back)
    monkeypatch.setattr(Passage, "fail", failing)
    monkeypatch.setattr(Pipeline, "_stage", staging)
    fs = SimFs(seed=1)
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        stored.files = LIES["no checksums"](stored.files)
        with pytest.raises(InvariantError):
            save(ckpt, 1, stored)
    stored.close()
    fs.close()
