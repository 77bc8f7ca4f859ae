"""Where any number of steps stay, a warning comes before the storage is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from statehold import Checkpointer, Directory, Keep
from statehold.steps import target
from support.faults import DEADLINE_S, SMALL
from support.levels import settle

NUMEL = 250_000


class Disk:
    """What the file system says is free: room for so many steps, less each step."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: float) -> None:
        self.steps = steps
        self.asked = 0
        patch.setattr(target, "free_bytes", self._free)

    def _free(self, directory: str) -> int:
        self.asked += 1
        assert Path(directory).is_dir()
        return int(self.steps * (4 * NUMEL + 8192))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch, 12.5)


def save(ckpt: Checkpointer, disk: Disk, steps: range, by: float = 1) -> None:
    for step in steps:
        disk.steps -= by
        ckpt.save(step, {"w": torch.zeros(NUMEL)}).wait("committed", DEADLINE_S)
        settle(ckpt)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "has room for about" in each.message]


@pytest.mark.parametrize(
    ("keep", "words"), [(None, "keeps all steps"), (Keep(every=2), "keeps any number of steps")]
)
def test_a_warning_comes_once_before_the_storage_is_full(
    run: Path, disk: Disk, keep: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run, keep=keep, **SMALL) as ckpt:
        save(ckpt, disk, range(1, 3))
        assert warned(caplog) == []
        save(ckpt, disk, range(3, 6))
    (text,) = warned(caplog)
    assert text.startswith(f"{run} {words}, and its storage has room for about 9 more of 981 KiB: ")
    assert "statehold prune" in text


def test_it_comes_again_after_there_was_room(
    run: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        for begin in (1, 11):
            disk.steps = 12
            save(ckpt, disk, range(begin, begin + 5))
    assert len(warned(caplog)) == 2


def test_a_number_of_steps_asks_nothing(
    run: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run, keep=2, **SMALL) as ckpt:
        save(ckpt, disk, range(1, 6), by=2)
    assert warned(caplog) == []
    assert disk.asked == 0


def test_a_file_system_that_cannot_be_asked_fails_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(directory: str) -> int:
        asked.append(directory)
        raise OSError(5, "no")

    monkeypatch.setattr(target, "free_bytes", refuse)
    with Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
    assert asked
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_each_level_has_its_own_warning(
    run: Path, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    far = Directory(path=tmp_path / "far", name="far")
    with Checkpointer(run, levels=[Directory(keep=1), far], **SMALL) as ckpt:
        save(ckpt, disk, range(1, 6))
    (text,) = warned(caplog)
    assert text.startswith(f"{tmp_path}/far keeps all steps")
