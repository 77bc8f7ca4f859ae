"""Whose steps are below a URL: a run goes on elsewhere, and no other run saves in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import statehold
from statehold import Directory, Memory, ObjectStore
from statehold.checkpoint.levels.owners import FILE_NAME, Identity, OwnedPrefix, Owner
from statehold.checkpoint.store.objects import ObjectSteps
from statehold.errors import CorruptionError, RunBusyError
from support.faults import DEADLINE_S, SMALL
from support.levels import save, status

pytest.importorskip("obstore")


def opened(folder: Path, name: str, url: str = "bucket") -> statehold.Checkpointer:
    far = ObjectStore(f"file://{folder}/{url}/llama", name="far")
    return statehold.Checkpointer(folder / name, levels=[Directory(), far], **SMALL)


def content(step: int) -> dict[str, object]:
    return {"w": torch.ones(5) * step, "step": step}


def saved(folder: Path, name: str, *steps: int) -> None:
    with opened(folder, name) as ckpt:
        ckpt.restore(content(0))
        for step in steps:
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)


def restored(folder: Path, name: str) -> int | None:
    with opened(folder, name) as ckpt:
        return ckpt.restore(content(0))


def in_store(folder: Path) -> list[int]:
    return sorted(int(at.name[5:17]) for at in (folder / "bucket" / "llama").glob("*.commit"))


def test_a_run_and_its_store_say_who_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "a", 1, 2)
    owner = (tmp_path / "bucket" / "llama" / FILE_NAME).read_bytes()
    assert owner == (tmp_path / "a" / FILE_NAME).read_bytes()
    saved(tmp_path, "a", 3)
    (tmp_path / "a").rename(tmp_path / "moved")
    saved(tmp_path, "moved", 4)
    assert in_store(tmp_path) == [1, 2, 3, 4]
    assert not caplog.records


def test_a_script_that_was_copied_with_its_url_saves_nothing_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "a", 1)
    with opened(tmp_path, "b") as ckpt:
        got = ckpt.restore(content(0))
        assert got == 1
        assert "step 1 was restored from another run" in caplog.text
        assert str(tmp_path / "a") in caplog.text
        for step in (2, 3):
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
        error = status(ckpt).error
    assert isinstance(error, RunBusyError)
    assert str(tmp_path / "a") in str(error)
    assert caplog.text.count("did not reach level far") == 1
    assert in_store(tmp_path) == [1]
    saved(tmp_path, "a", 9)
    assert in_store(tmp_path) == [1, 9]
    assert restored(tmp_path, "b") == 3  # not the 9 of the other run
    assert "continuing without level far" in caplog.text


def test_a_run_goes_on_where_only_the_store_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "a", 1)
    shutil.rmtree(tmp_path / "a")
    saved(tmp_path, "b", 2)
    assert "step 1 belongs to the run" in caplog.text
    assert in_store(tmp_path) == [1, 2]
    caplog.clear()
    assert restored(tmp_path, "b") == 2
    assert not caplog.records


def test_a_run_that_went_on_elsewhere_saves_no_more_in_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "here").mkdir()
    with opened(tmp_path / "here", "a", "../bucket") as first:
        save(first, 1, content(1))
        first.flush(DEADLINE_S)
        (tmp_path / "here").rename(tmp_path / "away")  # as seen from another cluster
        saved(tmp_path, "b", 2)
        (tmp_path / "away").rename(tmp_path / "here")
        save(first, 3, content(3))
        first.flush(DEADLINE_S)
        assert isinstance(status(first).error, RunBusyError)
    assert in_store(tmp_path) == [1, 2]


def test_a_copy_of_a_run_directory_is_another_run(tmp_path: Path) -> None:
    saved(tmp_path, "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    saved(tmp_path, "b", 2)
    assert in_store(tmp_path) == [1]


def test_steps_from_before_there_were_ids_are_the_runs_own(tmp_path: Path) -> None:
    saved(tmp_path, "a", 1)
    (tmp_path / "a" / FILE_NAME).unlink()
    (tmp_path / "bucket" / "llama" / FILE_NAME).unlink()
    saved(tmp_path, "a", 2)
    assert in_store(tmp_path) == [1, 2]


def test_a_run_that_lost_its_id_knows_itself_by_its_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "a", 1)
    (tmp_path / "a" / FILE_NAME).write_text("{")
    with opened(tmp_path, "a") as ckpt:
        shutil.rmtree(tmp_path / "a" / "step-000000000001")
        ckpt.restore(content(0))
        save(ckpt, 2, content(2))
    assert in_store(tmp_path) == [1, 2]


def test_a_note_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    for raw in (b"", b"{}", Owner("0" * 16, "/x", "h").encode().replace(b"0000", b"zzzz")):
        with pytest.raises(
            CorruptionError, match="the note of the run that owns these steps is not valid"
        ):
            Owner.decode(raw, "run.json")
    owner = Owner("0123456789abcdef", "/x", "h")
    assert Owner.decode(owner.encode(), "") == owner
    assert Identity(str(tmp_path)).own is None


def test_a_run_without_an_object_store_needs_no_id(tmp_path: Path) -> None:
    levels = [Memory(path=tmp_path / "m", agent=False), Directory()]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        save(ckpt, 1, content(1))
    assert not (tmp_path / "run" / FILE_NAME).exists()


def test_an_agent_takes_nothing_from_a_newer_trainer(tmp_path: Path) -> None:
    objects = ObjectSteps(f"file://{tmp_path}/bucket")
    identity = Identity(str(tmp_path / "run"))
    identity.establish()
    ours = identity.own
    assert ours is not None
    newer = Owner(ours.id, ours.run, "another-host").encode()
    objects.put_note(FILE_NAME, newer)
    OwnedPrefix("far", objects, identity, leads=True, yields=True).claim()
    assert objects.note(FILE_NAME) == newer
    OwnedPrefix("far", objects, identity, leads=True, yields=False).claim()
    assert objects.note(FILE_NAME) == ours.encode()
