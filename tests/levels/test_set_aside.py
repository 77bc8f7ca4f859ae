"""A step that is damaged in an object store, and whole nowhere: it is set aside there, too."""

from __future__ import annotations

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import statehold
from statehold.errors import StepOrderError, StorageError
from statehold.io.objects.client import ObjectClient
from statehold.steps.lock import RunLock
from statehold.steps.objects import ObjectSteps
from statehold.steps.store import Store
from statehold.testing import ranks_on
from support.faults import DEADLINE_S, SMALL

pytest.importorskip("obstore")

DATA = "rank-00000-of-00001.safetensors"
TOLD = r"step 20 is damaged; step 10 was restored instead"


def state(step: int) -> dict[str, object]:
    return {"step": step, "w": torch.full((1000,), float(step))}


def levels(folder: Path) -> list[statehold.Directory | statehold.ObjectStore]:
    (folder / "bucket").mkdir(parents=True, exist_ok=True)
    return [statehold.Directory(), statehold.ObjectStore(f"file://{folder}/bucket/llama")]


def save(folder: Path, *steps: int) -> None:
    with statehold.Checkpointer(folder / "run", levels=levels(folder), **SMALL) as ckpt:
        for step in steps:
            ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
            ckpt.flush(DEADLINE_S)


def in_store(folder: Path, step: int) -> Path:
    (found,) = (folder / "bucket/llama").glob(f"step-{step:012d}.*-*")
    return found


def objects(folder: Path) -> list[str]:
    """What makes steps committed, or sets them aside."""
    names = (each.name for each in (folder / "bucket/llama").glob("step-*") if each.is_file())
    return sorted(name.removeprefix("step-0000000000") for name in names)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Steps 10 and 20 in a store alone; the data of the newer one is lost. Returns what is left of
    it there."""
    save(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "run")
    (in_store(tmp_path, 20) / DATA).unlink()
    return in_store(tmp_path, 20)


def test_the_run_goes_on_and_nothing_of_the_step_is_lost(damaged: Path, tmp_path: Path) -> None:
    left = {path.name: path.read_bytes() for path in damaged.iterdir()}
    with statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt:
        with pytest.warns(RuntimeWarning, match=rf"{TOLD}.*kept as file:\S*20\.corrupt"):
            assert ckpt.restore(state(0)) == 10
        assert ckpt.steps() == [10]
        for step in (11, 20):  # also the same step again
            ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
            ckpt.flush(DEADLINE_S)
        assert [level.newest for level in ckpt.levels()] == [20, 20]
    assert objects(tmp_path) == ["10.commit", "11.commit", "20.commit", "20.corrupt"]
    assert {path.name: path.read_bytes() for path in damaged.iterdir()} == left
    shutil.rmtree(tmp_path / "run")
    with statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt:
        live = state(0)
        assert ckpt.restore(live) == live["step"] == 20


def test_it_is_set_aside_at_every_level(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / "run/step-000000000020" / DATA).unlink()
    in_store(tmp_path, 20).joinpath("manifest.json").write_bytes(b"{}")
    in_store(tmp_path, 20).joinpath(DATA).unlink()
    with (
        statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt,
        pytest.warns(RuntimeWarning, match=rf"{TOLD}.*kept as /\S*20\.corrupt"),
    ):
        assert ckpt.restore(state(0)) == 10
    assert (tmp_path / "run/step-000000000020.corrupt").is_dir()
    assert objects(tmp_path) == ["10.commit", "20.corrupt"]


def test_of_two_ranks_one_sets_it_aside(tmp_path: Path) -> None:
    def each(act: object) -> list[object]:
        options = {**SMALL, "levels": levels(tmp_path), "peer_timeout_s": DEADLINE_S}
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(act, ranks_on(None, str(tmp_path / "run"), 2, **options)))

    def begin(ckpt: statehold.Checkpointer) -> None:
        with ckpt:
            for step in (10, 20):
                ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
                ckpt.flush(DEADLINE_S)

    def go_on(ckpt: statehold.Checkpointer) -> int | None:
        with ckpt:
            restored = ckpt.restore(state(0))
            ckpt.save(11, state(11)).wait("committed", DEADLINE_S)
            return restored

    each(begin)
    shutil.rmtree(tmp_path / "run")
    in_store(tmp_path, 20).joinpath("rank-00001-of-00002.json").unlink()
    with pytest.warns(RuntimeWarning, match=TOLD):
        assert each(go_on) == [10, 10]
    assert objects(tmp_path) == ["10.commit", "11.commit", "20.corrupt"]


@pytest.mark.usefixtures("damaged")
def test_beside_another_job_of_the_run_it_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock(str(tmp_path / "run"))
    with (
        statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt,
        pytest.warns(RuntimeWarning, match=rf"{TOLD}.*kept as file:\S*20\.\n"),
    ):
        assert ckpt.restore(state(0)) == 10
    lock.release()
    assert objects(tmp_path) == ["10.commit", "20.commit"]


@pytest.mark.parametrize("note", [b"\0" * 20, b'{"format": "statehold-run", "version": 99}'])
def test_a_store_whose_note_is_damaged_keeps_it_and_the_state_is_restored(
    tmp_path: Path, note: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each restart raised the error of the note."""
    save(tmp_path, 10, 20)
    for step in (10, 20):
        shutil.rmtree(tmp_path / f"run/step-{step:012d}")
    in_store(tmp_path, 20).joinpath(DATA).unlink()
    (tmp_path / "bucket/llama/run.json").write_bytes(note)
    for _ in range(2):
        with (
            statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt,
            pytest.warns(RuntimeWarning, match=rf"{TOLD}.*kept as file:\S*20\.\n"),
        ):
            assert ckpt.restore(state(0)) == 10
    assert "step 20 stays at level objects" in caplog.text
    assert objects(tmp_path) == ["10.commit", "20.commit"]


def test_a_directory_that_cannot_be_listed_keeps_no_store_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> statehold.Checkpointer:
        near, far = levels(tmp_path)
        nfs = statehold.Directory(str(tmp_path / "nfs"), name="nfs")
        return statehold.Checkpointer(tmp_path / "run", levels=[near, nfs, far], **SMALL)

    def listed(store: Store) -> list[int]:
        if store.root == str(tmp_path / "nfs"):
            raise StorageError("cannot list", errno=errno.EIO, path=store.root)
        return steps(store)

    with opened() as ckpt:
        for step in (10, 20):
            ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
            ckpt.flush(DEADLINE_S)
    shutil.rmtree(tmp_path / "run")
    in_store(tmp_path, 20).joinpath(DATA).unlink()
    steps = Store.steps
    monkeypatch.setattr(Store, "steps", listed)
    with opened() as ckpt:
        with pytest.warns(RuntimeWarning, match=rf"{TOLD}.*kept as file:\S*20\.corrupt"):
            assert ckpt.restore(state(0)) == 10
        ckpt.save(11, state(11)).wait("committed", DEADLINE_S)
    assert objects(tmp_path) == ["10.commit", "11.commit", "20.corrupt"]


@pytest.mark.usefixtures("damaged")
def test_a_store_that_cannot_do_it_now_is_named_and_the_next_restart_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: ObjectClient, name: str, new: str) -> None:
        raise StorageError("cannot rename", errno=errno.EIO, path=name)

    with (
        monkeypatch.context() as patch,
        statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt,
    ):
        patch.setattr(ObjectClient, "rename", refused)
        with pytest.warns(RuntimeWarning, match=rf"{TOLD}.*kept as file:\S*20\.\n"):
            assert ckpt.restore(state(0)) == 10
        assert "step 20 stays at level objects" in caplog.text
        with pytest.raises(StepOrderError):
            ckpt.save(11, state(11))
    assert objects(tmp_path) == ["10.commit", "20.commit"]
    with statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt:
        with pytest.warns(RuntimeWarning, match=TOLD):
            assert ckpt.restore(state(0)) == 10
        ckpt.save(11, state(11)).wait("committed", DEADLINE_S)
    assert objects(tmp_path) == ["10.commit", "11.commit", "20.corrupt"]


def test_a_store_that_does_not_answer_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the step is whole there. The disk's is set aside, as without a store."""
    save(tmp_path, 10, 20)
    (tmp_path / "run/step-000000000020" / DATA).unlink()

    def away(_: ObjectSteps) -> list[int]:
        raise StorageError("away", errno=errno.EIO, path="bucket")

    with (
        monkeypatch.context() as patch,
        statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt,
    ):
        patch.setattr(ObjectSteps, "steps", away)
        with pytest.warns(RuntimeWarning, match=rf"{TOLD}.*kept as /\S*20\.corrupt"):
            assert ckpt.restore(state(0)) == 10
    assert objects(tmp_path) == ["10.commit", "20.commit"]


@pytest.mark.usefixtures("damaged")
def test_the_store_of_another_run_is_left_alone(tmp_path: Path) -> None:
    """Its run is restored from there, as this one has no id yet, but it goes on elsewhere."""
    save(tmp_path / "other", 5)
    note = (tmp_path / "other/bucket/llama/run.json").read_bytes()
    with statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt:
        (tmp_path / "bucket/llama/run.json").write_bytes(note)
        with pytest.warns(RuntimeWarning, match=TOLD):
            assert ckpt.restore(state(0)) == 10
        ckpt.save(11, state(11)).wait("committed", DEADLINE_S)  # it counts no step of that run
    assert objects(tmp_path) == ["10.commit", "20.commit"]
