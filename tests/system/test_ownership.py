"""What another user has made, or may write, is not used; what others may not see is closed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import statehold
from statehold import _core
from statehold.cli import main
from statehold.errors import StorageError
from statehold.offload.store import claim_folder
from statehold.process.ownership import is_own, make_own_directory
from statehold.steps.pool import linked
from support.faults import DEADLINE_S, SMALL

STRANGER = 65534


def given_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
attacks = pytest.mark.parametrize(
    "attack", [pytest.param(given_away, marks=needs_root), open_to_all]
)
Attack = Callable[[Path], None]


def saved(run: Path, memory: Path, step: int, value: float) -> None:
    levels = [statehold.Memory(path=memory, keep=2, agent=False), statehold.Directory(keep=2)]
    with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
        ckpt.save(step, {"w": torch.full((8,), value)}).wait("committed", DEADLINE_S)


@attacks
@pytest.mark.parametrize("beside", ["", "-copies"])
def test_a_memory_level_that_others_may_write_is_neither_restored_nor_used(
    tmp_path: Path, memory: Path, attack: Attack, beside: str
) -> None:
    level = memory / "job"
    saved(tmp_path / "forged", level, 1000, 666.0)
    attacked = Path(f"{level}{beside}")
    attacked.mkdir(exist_ok=True)
    attack(attacked)
    with pytest.raises(StorageError, match="another user may write"):
        saved(tmp_path / "run", level, 1, 1.0)


def test_a_link_of_this_user_to_its_memory_is_followed(tmp_path: Path, memory: Path) -> None:
    (memory / "there").mkdir(parents=True)
    (memory / "link").symlink_to(memory / "there")
    saved(tmp_path / "run", memory / "link", 1, 1.0)
    assert (memory / "there" / "step-000000000001").is_dir()


@needs_root
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, memory: Path) -> None:
    (memory / "there").mkdir(parents=True)
    (memory / "link").symlink_to(memory / "there")
    os.lchown(memory / "link", STRANGER, STRANGER)
    with pytest.raises(StorageError, match="another user may write"):
        saved(tmp_path / "run", memory / "link", 1, 1.0)


def test_nobody_else_looks_into_a_memory_level(tmp_path: Path, memory: Path) -> None:
    saved(tmp_path / "run", memory / "job", 1, 1.0)
    assert stat.S_IMODE((memory / "job").stat().st_mode) == 0o700


@attacks
def test_an_optimizer_passes_over_a_folder_that_others_may_write(
    tmp_path: Path, attack: Attack
) -> None:
    theirs = tmp_path / "optimizer-0"
    theirs.mkdir()
    attack(theirs)
    claim = claim_folder(_core.open_fs("threads", 1), str(tmp_path))
    try:
        assert claim.folder == f"{tmp_path}/optimizer-1"
        assert stat.S_IMODE(os.stat(claim.folder).st_mode) == 0o700
        assert os.listdir(theirs) == []
    finally:
        claim.release()


@attacks
def test_a_file_that_others_may_write_gets_no_second_name(tmp_path: Path, attack: Attack) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x")
    fs = _core.open_fs("threads", 1)
    assert linked(fs, str(source), str(target))
    target.unlink()
    attack(source)
    assert not linked(fs, str(source), str(target))
    assert not target.exists()


@attacks
def test_an_export_refuses_a_directory_that_others_may_write(
    tmp_path: Path, attack: Attack
) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(8)}).wait("committed", DEADLINE_S)
    theirs = tmp_path / "out.partial"
    theirs.mkdir()
    attack(theirs)
    assert main(["export", str(run), str(tmp_path / "out"), "--to", "dcp"])
    assert os.listdir(theirs) == []


@pytest.mark.parametrize("kind", ["symlink", "hardlink"])
@pytest.mark.parametrize("name", [".journal", "__0_0.distcp"])
def test_an_export_writes_through_no_link(tmp_path: Path, kind: str, name: str) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(8)}).wait("committed", DEADLINE_S)
    precious.write_text("the only key")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    if kind == "symlink":
        (partial / name).symlink_to(precious)
    else:
        (partial / name).hardlink_to(precious)
    main(["export", str(run), str(tmp_path / "out"), "--to", "dcp"])
    assert precious.read_text() == "the only key"


@needs_root
def test_where_the_file_system_gives_all_to_another_user_that_user_is_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with root."""
    make_own_directory(str(tmp_path / "made"), "of a test")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert is_own(str(tmp_path / "made"))
    given_away(tmp_path / "made")
    assert is_own(str(tmp_path / "made"))
