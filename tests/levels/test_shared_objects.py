"""An object store has the files that steps share once, and deletes them when no step has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.cli import main
from statehold.errors import StateholdError, StorageError
from statehold.steps.objects import SHARED, ObjectSteps
from support.faults import DEADLINE_S, SMALL
from support.inside import end, inside
from support.levels import settle
from support.sharing import Tuned, same

pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("small_shared_files")


class Run:
    """Saves a model step by step to a directory, and copies each step to an object store."""

    def __init__(self, folder: Path, **far: Any) -> None:
        self.bucket = folder / "bucket"
        self.bucket.mkdir(parents=True)
        self.run = folder / "run"
        self.far = far
        self.model = Tuned()
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.ckpt = self.opened()

    def opened(self) -> statehold.Checkpointer:
        far = statehold.ObjectStore(f"file://{self.bucket}/llama", name="far", **self.far)
        return statehold.Checkpointer(self.run, levels=[statehold.Directory(keep=2), far], **SMALL)

    def again(self) -> None:
        """Another job goes on, whatever has become of the one before."""
        end(self.ckpt, flush=False)
        self.ckpt = self.opened()

    def save(self, step: int) -> None:
        self.ckpt.gate()
        self.model.train_once()
        self.expected[step] = self.model.bits()
        self.ckpt.save(step, {"model": self.model}).wait("committed", DEADLINE_S)
        settle(self.ckpt)  # the copy may begin after the commit

    @property
    def steps(self) -> ObjectSteps:
        place: Any = inside(self.ckpt).levels.places[1]
        found: ObjectSteps = place.objects
        return found

    def shared(self) -> dict[str, int]:
        folder = self.bucket / "llama" / SHARED
        return (
            {each.name: each.stat().st_size for each in folder.iterdir()} if folder.is_dir() else {}
        )

    def check(self) -> None:
        """Every step of the store restores bit for bit when the disk is lost."""
        end(self.ckpt, flush=False)
        shutil.rmtree(self.run)
        self.ckpt = self.opened()
        assert self.ckpt.steps()
        for step in self.ckpt.steps():
            model = Tuned()
            assert self.ckpt.restore({"model": model}, step) == step
            assert same(model.bits(), self.expected[step]), step
        end(self.ckpt, flush=False)


def uploads(run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The sizes of objects that are uploaded from now on."""
    found, client = dict[str, int](), run.steps.client
    real = client.upload

    def upload(name: str, size: int, *rest: Any) -> None:
        found[name] = size
        real(name, size, *rest)

    monkeypatch.setattr(client, "upload", upload)
    return found


def test_only_what_changed_goes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save(1)
    assert sum(run.shared().values()) > run.model.base_bytes
    before, sent = run.shared(), uploads(run, monkeypatch)
    for step in (2, 3):
        run.save(step)
    assert run.shared() == before
    assert len(sent) == 2
    assert sum(sent.values()) < 2 * (run.model.head.nbytes + 8192)
    assert main(["verify", "--all", "--levels", str(run.run)]) == 0
    run.check()


def test_an_object_goes_with_the_last_step_that_has_it(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    for step in (1, 2):
        run.save(step)
    first = run.shared()
    with torch.no_grad():
        for each in run.model.base:
            each.add_(1.0)
    for step in (3, 4, 5, 6, 7):  # written as what changes, until it has stayed the same
        run.save(step)
    assert first
    assert not first.keys() & run.shared().keys()
    assert run.shared()
    run.check()


def test_a_retired_step_leaves_the_objects_of_others(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    run.save(1)
    first = run.shared()
    for step in (2, 3, 4):
        run.save(step)
    assert run.shared() == first
    run.check()


def test_what_a_dead_job_left_is_swept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    orphan = run.bucket / "llama" / SHARED / f"{'0' * 64}.safetensors"
    orphan.write_bytes(b"left")
    run.again()
    run.save(2)
    assert not orphan.exists()
    run.check()


def test_what_others_have_beside_the_objects_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    folder = run.bucket / "llama" / SHARED
    folder.mkdir(parents=True)
    theirs = [folder / name for name in ("tokenizer.json", "base.safetensors")]
    for each in theirs:
        each.write_bytes(b"not of a run")
    for step in (1, 2):
        run.save(step)
    assert all(each.exists() for each in theirs)
    run.check()


def test_nothing_is_deleted_when_a_reference_is_damaged(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    run.save(1)
    orphan = run.bucket / "llama" / SHARED / f"{'0' * 64}.safetensors"
    orphan.write_bytes(b"left")
    run.again()
    left = run.bucket / "llama" / "step-000000000009.00000000-1"
    left.mkdir()
    (left / "rank-00000-of-00001.shared.json").write_bytes(b"damaged")
    steps = run.steps
    with pytest.raises(StateholdError):
        steps.shared.sweep([left.name])
    assert orphan.exists()
    run.save(2)  # clears what no step names
    run.save(3)
    assert not orphan.exists()
    run.check()


def test_an_object_that_is_gone_at_the_commit_is_sent_by_the_next_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.save(1)
    shared, has = run.steps.shared, run.steps.shared.has

    def swept(name: str, size: int) -> bool:
        found = has(name, size)
        (run.bucket / "llama" / SHARED / name).unlink(missing_ok=True)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(shared, "has", swept)
        run.save(2)
    assert run.steps.steps() == [1]
    run.save(3)
    assert "is gone" in caplog.text
    assert run.steps.steps() == [1, 3]
    run.check()


def interrupt(run: Run, at: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every operation fail from number `at` on that changes the store."""
    client, made = run.steps.client, list[str]()

    def before(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: str, *args: Any) -> Any:
            made.append(f"{name} {path}")
            if len(made) > at:
                raise StorageError("the process is dead")
            return real(path, *args)

        return call

    for name in ("put", "upload", "delete", "delete_below"):
        monkeypatch.setattr(client, name, before(name, getattr(client, name)))
    return made


@pytest.mark.thorough
def test_a_death_before_any_change_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = 0
    for at in range(40):
        run = Run(tmp_path / str(at), keep=1)
        run.save(1)
        with torch.no_grad():
            run.model.base[0].add_(1.0)
        with monkeypatch.context() as patch:
            made = interrupt(run, at, patch)
            run.save(2)
            run.save(3)
        run.again()
        run.save(4)
        run.save(5)
        run.save(6)  # a commit deletes what the retirement before it left
        directories = [each for each in run.steps.client.list()[1] if each != SHARED]
        there = run.shared()
        for each in directories:
            run.steps.shared.check(each)
        run.steps.shared.sweep(directories)
        assert run.shared() == there
        run.check()
        if len(made) <= at:
            break
        deaths += 1
    assert 8 < deaths < 39
