"""What follows a save: paths get their steps in order, the newest weights come first, and Ctrl-C in
a caller leaves nobody waiting."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import StateholdError
from statehold.integrations.trained import Finisher
from statehold.process.whole_files import sync_files
from support.faults import DEADLINE_S, must
from support.interrupts import interrupt_everywhere
from support.power import SyncedDisk


class Saved:
    """A save that ends at end()."""

    def __init__(self, step: int, error: StateholdError | None = None) -> None:
        self.step = step
        self.ended = threading.Event()
        self._error = error

    def wait(self, stage: str) -> None:
        must(stage == "committed" and self.ended.wait(DEADLINE_S))
        if self._error is not None:
            raise self._error

    def end(self) -> Saved:
        self.ended.set()
        return self


class Kept:
    """A path that notes what becomes of it."""

    def __init__(self, path: str, notes: list[str]) -> None:
        self.path = path
        self.is_ours = True
        self._notes = notes

    def hold(self, step: int) -> None:
        self._notes.append(f"{self.path} has {step}")

    def remove(self) -> None:
        self.is_ours = False
        self._notes.append(f"{self.path} is gone")

    def write(self) -> None:
        self._notes.append(f"{self.path} is written")


def made(write: Callable[[Kept], None] = Kept.write) -> Any:
    return Finisher(write, "load()")


def test_a_path_goes_after_the_saves_before_it_and_the_newest_is_written_first() -> None:
    notes: list[str] = []
    finisher, first, second = made(), Saved(1), Saved(2)
    finisher.hold(first, Kept("a", notes))
    finisher.hold(second, Kept("b", notes))
    assert notes == []
    first.end()
    finisher.wait(1)
    assert notes == ["a has 1"]
    finisher.remove(Kept("a", notes))
    second.end()
    finisher.finish(write=True)
    assert notes[:3] == ["a has 1", "b has 2", "a is gone"]
    assert notes[3:] == ["b is written"]


def test_a_path_that_is_saved_again_stays() -> None:
    notes: list[str] = []
    finisher, first = made(lambda _: None), Saved(1)
    finisher.hold(first, Kept("a", notes))
    finisher.remove(Kept("a", notes))
    finisher.hold(Saved(2).end(), Kept("a", notes))
    first.end()
    finisher.finish(write=False)
    assert notes == ["a has 1", "a has 2"]


def test_after_a_save_that_failed_nothing_is_removed() -> None:
    notes: list[str] = []
    finisher = made()
    finisher.hold(Saved(1).end(), Kept("a", notes))
    finisher.hold(Saved(2, StateholdError("failed")).end(), Kept("b", notes))
    finisher.remove(Kept("a", notes))
    finisher.finish(write=False)
    assert "a is gone" not in notes


def test_a_path_that_goes_after_the_next_save_gets_no_step_of_its_own() -> None:
    """With a save at every step, each path would cost three syncs and be removed at once."""
    notes: list[str] = []
    finisher, first = made(), Saved(1)
    finisher.hold(first, Kept("a", notes))
    finisher.hold(Saved(2).end(), Kept("b", notes))
    finisher.remove(Kept("a", notes))
    finisher.hold(Saved(3).end(), Kept("c", notes))
    first.end()
    finisher.finish(write=False)
    assert notes == ["b has 2", "a is gone", "c has 3"]


def test_a_path_that_was_to_go_gets_its_step_if_the_next_save_fails() -> None:
    """It stays then, and the run may retire the step soon."""
    notes: list[str] = []
    finisher, first = made(), Saved(1)
    finisher.hold(first, Kept("a", notes))
    finisher.hold(Saved(2, StateholdError("failed")).end(), Kept("b", notes))
    finisher.remove(Kept("a", notes))
    first.end()
    finisher.finish(write=True)
    assert notes == ["a has 1", "a is written"]


def test_a_path_that_goes_two_saves_later_gets_its_step() -> None:
    """If the second of them failed, the run might have retired the step."""
    notes: list[str] = []
    finisher, first = made(), Saved(1)
    finisher.hold(first, Kept("a", notes))
    finisher.hold(Saved(2).end(), Kept("b", notes))
    finisher.hold(Saved(3, StateholdError("failed")).end(), Kept("c", notes))
    finisher.remove(Kept("a", notes))
    first.end()
    finisher.finish(write=False)
    assert notes == ["a has 1", "b has 2"]


def test_a_path_that_is_gone_gets_no_step_when_a_later_save_fails() -> None:
    notes: list[str] = []
    finisher, first, path = made(), Saved(1), Kept("a", notes)
    finisher.hold(first, path)
    finisher.remove(path)
    finisher.hold(Saved(2, StateholdError("failed")).end(), Kept("b", notes))
    first.end()
    finisher.finish(write=False)
    assert notes == ["a is gone"]


def test_weights_that_cannot_be_written_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(path: Kept) -> None:
        raise ValueError(f"no {path.path}")

    there, gone = Kept("there", []), Kept("gone", [])
    gone.remove()
    finisher = made(fail)
    for each in (there, gone):
        finisher.write(each)
    assert caplog.messages == ["there has no weights for load(): no there"]


def test_ctrl_c_between_saves_does_not_hang_the_end_of_the_training() -> None:
    notes: list[str] = []
    save, path = Saved(1).end(), Kept("a", notes)

    def make() -> Any:
        notes.clear()
        finisher = made()
        finisher.hold(save, path)  # the thread has begun
        return finisher

    def call(finisher: Any) -> None:
        finisher.hold(save, path)
        finisher.wait(1)
        finisher.remove(path)
        finisher.wait()

    def after(finisher: Any) -> None:
        finisher.wait()
        finisher.hold(save, path)
        finisher.finish(write=True)

    places = interrupt_everywhere(
        [Finisher.hold, Finisher.remove, Finisher.wait], make, call, after
    )
    assert notes.count("a has 1") >= 2
    assert {"hold", "remove", "wait"} <= places


def test_ctrl_c_at_the_end_does_not_hang_it() -> None:
    def make() -> Any:
        finisher = made()
        finisher.hold(Saved(1).end(), Kept("a", []))  # the thread has begun
        return finisher

    def end(finisher: Any) -> None:
        finisher.finish(write=False)

    assert "finish" in interrupt_everywhere([Finisher.finish], make, end, end)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty run directory, alone on a disk."""
    path = tmp_path / "disk/run"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def disk(run: Path, monkeypatch: pytest.MonkeyPatch) -> SyncedDisk:
    return SyncedDisk(run.parent, monkeypatch)


@pytest.fixture
def folders(run: Path) -> Any:
    return pytest.importorskip("statehold.integrations.transformers.folders").Folders(str(run))


def save_in(run: Path, size: int = 5) -> None:
    with statehold.Checkpointer(run) as ckpt:
        ckpt.save(7, {"w": torch.arange(float(size))}).wait("committed")


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
def test_second_names_outlive_a_power_cut(
    tmp_path: Path, run: Path, disk: SyncedDisk, folders: Any,
    monkeypatch: pytest.MonkeyPatch, has_links: bool,
) -> None:  # fmt: skip
    """The run retires the step later, and then the folder alone has it."""
    save_in(run)
    disk.trust(run.parent)
    folders.make(7, "{}")
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    folders.hold(7)
    left = disk.cut(tmp_path / "left")
    assert statehold.load(left / "run/checkpoint-7", "w").tolist() == [0, 1, 2, 3, 4]


def test_second_names_take_no_read_of_the_step(run: Path, folders: Any) -> None:
    """A Trainer has a new best step again and again, and the training may wait for its names."""
    save_in(run, size=1 << 20)
    folders.make(7, "{}")
    before = bytes_read()
    folders.hold(7)
    assert bytes_read() - before < 1 << 20  # of 4 MiB
    assert folders.holds(7)


def bytes_read() -> int:
    """By this process so far, from the cache or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def refuse(*_: object) -> None:
    raise OSError(errno.EPERM, "injected: no second names here")


def test_weights_that_are_there_after_a_power_cut_are_whole(
    tmp_path: Path, run: Path, disk: SyncedDisk, folders: Any
) -> None:
    """Nobody would write them again."""
    folders.make(7, "{}")
    with folders.beside(7) as new:
        (new / "model.safetensors").write_bytes(b"weights")
    # A disk may have the names at any time.
    sync_files([folders.path(7), run])
    left = disk.cut(tmp_path / "left")
    assert (left / "run/checkpoint-7/model.safetensors").read_bytes() == b"weights"


def test_the_folder_of_a_committed_step_outlives_a_power_cut(
    tmp_path: Path, disk: SyncedDisk, folders: Any
) -> None:
    """The step may lie in an object store, and without its folder it would count as given up."""
    from statehold.integrations.transformers.folders import Folder

    folder = Folder(folders, 7)
    folders.make(7, "{}")
    finisher = made(lambda _: None)
    finisher.hold(Saved(7).end(), folder)
    finisher.finish(write=False)
    assert (disk.cut(tmp_path / "left") / "run/checkpoint-7").is_dir()
