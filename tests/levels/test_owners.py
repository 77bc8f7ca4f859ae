"""Whose steps are at a level: a run goes on elsewhere, and no other run saves in between."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import statehold
from statehold import Directory, Memory, ObjectStore
from statehold.checkpoint.levels.specs import Level
from statehold.cli import main
from statehold.errors import CorruptionError, RunBusyError
from statehold.steps.objects import ObjectSteps
from statehold.steps.owners import FILE_NAME, Identity, OwnedSteps, Owner
from support.faults import DEADLINE_S, SMALL
from support.levels import save, status


@dataclass
class Runs:
    """Runs in a folder that share a second level, of this kind."""

    folder: Path
    kind: str

    def opened(self, name: str, place: str = "bucket") -> statehold.Checkpointer:
        where = f"{self.folder}/{place}/llama"
        far: Level = Directory(path=where, name="far")
        if self.kind == "objects":
            far = ObjectStore(f"file://{where}", name="far")
        return statehold.Checkpointer(self.folder / name, levels=[Directory(), far], **SMALL)

    def saved(self, name: str, *steps: int) -> None:
        with self.opened(name) as ckpt:
            ckpt.restore(content(0))
            for step in steps:
                save(ckpt, step, content(step))
                ckpt.flush(DEADLINE_S)

    def restored(self, name: str) -> int | None:
        with self.opened(name) as ckpt:
            return ckpt.restore(content(0))

    def at_far(self) -> list[int]:
        far = self.folder / "bucket" / "llama"
        found = far.glob("*.commit" if self.kind == "objects" else "step-*")
        return sorted(int(at.name[5:17]) for at in found)


@pytest.fixture(params=["objects", "directory"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Runs:
    if request.param == "objects":
        pytest.importorskip("obstore")
    return Runs(tmp_path, request.param)


def content(step: int) -> dict[str, object]:
    return {"w": torch.ones(5) * step, "step": step}


def test_a_run_and_its_store_say_who_it_is(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.saved("a", 1, 2)
    owner = (tmp_path / "bucket" / "llama" / FILE_NAME).read_bytes()
    assert owner == (tmp_path / "a" / FILE_NAME).read_bytes()
    runs.saved("a", 3)
    (tmp_path / "a").rename(tmp_path / "moved")
    runs.saved("moved", 4)
    assert runs.at_far() == [1, 2, 3, 4]
    assert not caplog.records


def test_a_script_that_was_copied_with_its_url_saves_nothing_there(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.saved("a", 1)
    with runs.opened("b") as ckpt:
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
    assert runs.at_far() == [1]
    runs.saved("a", 9)
    assert runs.at_far() == [1, 9]
    assert runs.restored("b") == 3  # not the 9 of the other run
    assert "continuing without level far" in caplog.text


def test_a_run_goes_on_where_only_the_store_is_left(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.saved("a", 1)
    shutil.rmtree(tmp_path / "a")
    runs.saved("b", 2)
    assert "step 1 belongs to the run" in caplog.text
    assert runs.at_far() == [1, 2]
    caplog.clear()
    assert runs.restored("b") == 2
    assert not caplog.records


@pytest.mark.parametrize("runs", ["objects"], indirect=True)  # of a directory there is a lock
def test_a_run_that_went_on_elsewhere_saves_no_more_in_the_store(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "here").mkdir()
    with runs.opened("here/a") as first:
        save(first, 1, content(1))
        first.flush(DEADLINE_S)
        (tmp_path / "here").rename(tmp_path / "away")  # as seen from another cluster
        runs.saved("b", 2)
        (tmp_path / "away").rename(tmp_path / "here")
        save(first, 3, content(3))
        first.flush(DEADLINE_S)
        assert isinstance(status(first).error, RunBusyError)
    assert runs.at_far() == [1, 2]


def test_a_note_that_expires_while_the_run_saves_is_written_again(runs: Runs) -> None:
    """A rule of the store, or a person, deletes it, and no other run has come meanwhile."""
    note = runs.folder / "bucket" / "llama" / FILE_NAME
    with runs.opened("a") as ckpt:
        save(ckpt, 1, content(1))
        ckpt.flush(DEADLINE_S)
        ours = note.read_bytes()
        note.unlink()
        save(ckpt, 2, content(2))
        ckpt.flush(DEADLINE_S)
        assert status(ckpt, "far").error is None
        assert runs.at_far() == [1, 2]
        if runs.kind == "objects":  # one asks before each copy
            assert note.read_bytes() == ours
            note.unlink()
    assert runs.restored("a") == 2
    runs.saved("a", 3)
    assert note.read_bytes() == ours
    assert runs.at_far() == [1, 2, 3]


def test_a_copy_of_a_run_directory_is_another_run(runs: Runs, tmp_path: Path) -> None:
    runs.saved("a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    runs.saved("b", 2)
    assert runs.at_far() == [1]


def test_steps_from_before_there_were_ids_are_the_runs_own(runs: Runs, tmp_path: Path) -> None:
    runs.saved("a", 1)
    (tmp_path / "a" / FILE_NAME).unlink()
    (tmp_path / "bucket" / "llama" / FILE_NAME).unlink()
    runs.saved("a", 2)
    assert runs.at_far() == [1, 2]


def test_a_run_that_lost_its_id_knows_itself_by_its_directory(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.saved("a", 1)
    (tmp_path / "a" / FILE_NAME).write_text("{")
    with runs.opened("a") as ckpt:
        shutil.rmtree(tmp_path / "a" / "step-000000000001")
        ckpt.restore(content(0))
        save(ckpt, 2, content(2))
    assert runs.at_far() == [1, 2]


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


def test_a_run_with_nothing_but_its_directory_needs_no_id(tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        save(ckpt, 1, content(1))
    assert not (tmp_path / "run" / FILE_NAME).exists()


def test_a_new_run_begins_at_any_step_beside_the_level_of_another(runs: Runs) -> None:
    runs.saved("a", 7, 8)
    with runs.opened("b") as ckpt:
        for step in (1, 2):
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
        assert ckpt.rewind(1) == [2]
        assert ckpt.steps() == [1]
    assert runs.at_far() == [7, 8]
    assert runs.restored("a") == 8


def test_the_first_level_of_another_run_takes_no_step(tmp_path: Path) -> None:
    def opened(name: str) -> statehold.Checkpointer:
        levels = [Memory(path=tmp_path / "shared", agent=False), Directory()]
        return statehold.Checkpointer(tmp_path / name, levels=levels, **SMALL)

    with opened("a") as ckpt:
        save(ckpt, 5, content(5))
        ckpt.flush(DEADLINE_S)
    with opened("b") as ckpt, pytest.raises(RunBusyError, match="belong to another run"):
        ckpt.save(6, content(6))
    with opened("a") as ckpt:  # and b has left no lock
        save(ckpt, 7, content(7))
        assert ckpt.steps() == [5, 7]


def test_a_run_that_cannot_note_its_id_goes_on(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "a" / FILE_NAME / "in the way").mkdir(parents=True)
    for step in (1, 2):
        with runs.opened("a") as ckpt:
            save(ckpt, step, content(step))
            ckpt.flush(DEADLINE_S)
    assert runs.at_far() == [1, 2]
    assert not (tmp_path / "bucket" / "llama" / FILE_NAME).exists()


def trained(run: Path, memory: Path | None, value: int, *steps: int) -> None:
    levels = [Memory(path=memory, keep=2, agent=False), Directory(keep=2)]
    with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
        for step in steps:
            save(ckpt, step, {"w": torch.full((5,), float(value))})
        ckpt.flush(DEADLINE_S)


def followed(run: Path) -> tuple[int, float]:
    weights = torch.zeros(5)
    with statehold.subscribe(run, {"w": weights}) as updates:
        update = updates.wait(timeout=DEADLINE_S)
        assert update is not None
        update.apply()
        return update.step, weights[0].item()


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_subscriber_takes_no_step_of_another_run(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other, memory = tmp_path / "run", tmp_path / "other", tmp_path / "memory"
    trained(run, memory, 1, 3)
    if how == "moved":
        run.rename(other)
        shutil.rmtree(memory)
    else:
        shutil.copytree(run, other)
    trained(run, memory, 7, 5)
    assert followed(run) == (5, 7)
    assert followed(other) == (3, 1)
    shown = main(["ls", str(other), "--levels"])
    assert shown == 0
    assert "belong to the run" in capsys.readouterr().out


def test_memory_of_another_run_is_not_freed(memory: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", memory, 1, 3)
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    given = tmp_path / "given"
    with statehold.Checkpointer(given, **SMALL) as ckpt:
        save(ckpt, 9, content(9))
    shutil.copy(tmp_path / "run" / "levels.json", given)
    for other in ("copied", "given"):
        assert main(["free", str(tmp_path / other), "--yes"]) == 0
        assert (memory / "step-000000000003").is_dir()
    assert main(["free", str(tmp_path / "run"), "--yes"]) == 0
    assert not memory.exists()


@pytest.mark.parametrize("how", ["fork", "copy", "import", "parent"])
def test_a_run_made_where_another_was_removed_restores_its_own_steps(
    memory: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, base = tmp_path / "run", tmp_path / "base"
    trained(run, memory, 1, 3)
    shutil.rmtree(run)
    with statehold.Checkpointer(base, **SMALL) as ckpt:
        save(ckpt, 2, {"w": torch.full((5,), 7.0)})
    torch.save({"w": torch.full((5,), 7.0)}, tmp_path / "w.pt")
    if how == "parent":
        with statehold.Checkpointer(run, parent=f"{base}@2", **SMALL) as ckpt:
            has_failed = ckpt.restore({"w": torch.zeros(5)}) != 2
    else:
        source = [str(tmp_path / "w.pt")] if how == "import" else [f"{base}@2"]
        has_failed = main([how, *source, f"{run}@2" if how == "import" else str(run)]) != 0
    assert not has_failed
    levels = [Memory(path=memory, agent=False), Directory()]
    with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
        live = {"w": torch.zeros(5)}
        got = ckpt.restore(live)
        assert (got, live["w"][0].item()) == (2, 7)
        assert "continuing without level memory" in caplog.text
        assert "the steps at this level belong to another run" in caplog.text
        with pytest.raises(RunBusyError, match="statehold free RUN"):
            ckpt.save(4, live)


def test_a_parent_does_not_take_the_place_of_steps_that_only_memory_has(
    memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, base = tmp_path / "run", tmp_path / "base"
    with statehold.Checkpointer(base, **SMALL) as ckpt:
        save(ckpt, 2, {"w": torch.full((5,), 7.0)})
    trained(run, memory, 1, 3)
    shutil.rmtree(run)
    levels = [Memory(path=memory, agent=False), Directory()]
    for _ in range(2):  # the first restore of the run, and one after a save
        with statehold.Checkpointer(run, parent=f"{base}@2", levels=levels, **SMALL) as ckpt:
            live = {"w": torch.zeros(5)}
            assert ckpt.restore(live) == 3
            assert torch.equal(live["w"], torch.ones(5))
            save(ckpt, 3, live)
    assert "continues that run" in caplog.text
    assert "statehold free RUN --yes --force" in caplog.text


def test_an_agent_takes_nothing_from_a_newer_trainer(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    objects = ObjectSteps(f"file://{tmp_path}/bucket")
    identity = Identity(str(tmp_path / "run"))
    identity.establish()
    ours = identity.own
    assert ours is not None
    newer = Owner(ours.id, ours.run, "another-host").encode()
    objects.put_note(FILE_NAME, newer)
    OwnedSteps("far", objects, identity, leads=True, yields=True).claim()
    assert objects.note(FILE_NAME) == newer
    OwnedSteps("far", objects, identity, leads=True, yields=False).claim()
    assert objects.note(FILE_NAME) == ours.encode()
