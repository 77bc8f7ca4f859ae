"""A level in an object store: steps get there whole, and come back when nothing nearer is left."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import statehold
from statehold.checkpoint.levels.object_place import ObjectPlace
from statehold.checkpoint.telemetry.watch import CopyWatch, LevelWatch
from statehold.errors import MissingFileError, StorageError, UnavailableError
from statehold.format.entries import sha256
from statehold.format.manifest import Commit, RecordEntry, record_name
from statehold.io.objects.client import ObjectClient, not_given_back
from statehold.observe.background_log import BackgroundLog
from statehold.observe.counters import Figures
from statehold.ranks.peers import Peers
from statehold.steps.copying import Copy, CopyPart
from statehold.steps.near_files import PREFIX
from statehold.steps.objects import ObjectSteps
from statehold.steps.owners import OwnedSteps
from statehold.steps.shelf import StepShelf
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs
from support.inside import inside
from support.levels import settle

pytest.importorskip("obstore")

CLOSED = {"endpoint": "http://127.0.0.1:1", "allow_http": True}
NUMEL = 5_000_000  # 38 MiB: several blocks and several parts


def content(step: int) -> dict[str, object]:
    return {"w": torch.arange(NUMEL) * 3 + step, "b": torch.ones(5) * step, "step": step}


def levels(folder: Path, **options: object) -> list[statehold.Directory | statehold.ObjectStore]:
    store = folder / "bucket"
    store.mkdir(exist_ok=True)
    return [statehold.Directory(keep=2), statehold.ObjectStore(f"file://{store}/llama", **options)]


def equal(state: dict[str, object], step: int) -> bool:
    expected = content(step)
    return state["step"] == step and all(
        torch.equal(state[name], expected[name])  # type: ignore[arg-type]
        for name in ("w", "b")
    )


@pytest.mark.thorough
def test_steps_reach_the_store_and_come_back_from_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, levels=levels(tmp_path, every=2, keep=2), **SMALL) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, content(step)).wait("committed", DEADLINE_S)
            settle(ckpt)
        assert [level.newest for level in ckpt.levels()] == [4, 4]
        ckpt.save(5, content(5))
    shutil.rmtree(run)  # the disk is lost
    live = content(0)
    with statehold.Checkpointer(run, levels=levels(tmp_path, keep=2), **SMALL) as ckpt:
        assert ckpt.steps() == [4, 5]
        got = ckpt.restore(live)
        assert got == 5
        assert equal(live, 5)
        got = ckpt.restore(live, 4)
        assert got == 4
        assert equal(live, 4)
        ckpt.save(6, content(6)).wait("committed", DEADLINE_S)
    assert not list(Path("/dev/shm").glob(f"{PREFIX}{os.getpid()}-*"))


def places_of_two_ranks(tmp_path: Path) -> list[ObjectPlace]:
    found = []
    for rank in range(2):
        owned = SimpleNamespace(claim=lambda: None, is_anothers=False, leads=rank == 0)
        objects = ObjectSteps(f"file://{tmp_path}/bucket")
        found.append(ObjectPlace("far", objects, keep=None, owned=cast(OwnedSteps, owned)))
        found[-1].prepare(cast(Peers, object()))
    return found


def manifest_of(step: int) -> bytes:
    """Of two ranks that have records alone."""
    entries = tuple(RecordEntry(record_name(rank, 2), 2, sha256(b"{}")) for rank in range(2))
    return Commit(step, 2, "2026-11-29T00:00:00Z", "test 1", "5f3a09c1-7", entries, {}).encode()


def part(rank: int, step: int) -> Copy:
    own = CopyPart((), ((record_name(rank, 2), b"{}"),), manifest_of(step))
    watch = CopyWatch(LevelWatch("far", 0, None, Figures({}), BackgroundLog()), "upload")
    return Copy(step, None, own, StepShelf(SimFs(seed=1), "/"), lambda _: None, watch)


def test_a_rank_that_is_ahead_keeps_its_part(tmp_path: Path) -> None:
    """It has given step 10 up, because the leading rank waits for an answer of the store."""
    late, ahead = places_of_two_ranks(tmp_path)
    ahead.take(part(1, 11))
    for step in (10, 11):
        late.take(part(0, step))
    late.commit(11, None, manifest_of(11))
    assert late.read(11, record_name(1, 2), 10) == b"{}"


def test_a_copy_without_the_part_of_a_rank_is_not_committed(tmp_path: Path) -> None:
    place, other = places_of_two_ranks(tmp_path)
    place.take(part(0, 11))
    with pytest.raises(MissingFileError, match="rank-00001-of-00002"):
        place.commit(11, None, manifest_of(11))
    assert place.steps() == []
    other.take(part(1, 11))
    place.commit(11, None, manifest_of(11))
    assert place.steps() == [11]


def test_a_step_saved_again_replaces_the_one_in_the_store(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        for value in (1, 2):
            again = content(7) | {"b": torch.ones(5) * value}
            ckpt.save(7, again).wait("committed", DEADLINE_S)
            ckpt.flush(DEADLINE_S)
    shutil.rmtree(run)
    live = content(0)
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        got = ckpt.restore(live)
        assert got == 7
    assert torch.equal(live["b"], torch.ones(5) * 2)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_rewind_gives_up_steps_in_the_store(tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, content(step)).wait("committed", DEADLINE_S)
            ckpt.flush(DEADLINE_S)
        got = ckpt.rewind(1)
        assert got == [2, 3]
        assert ckpt.steps() == [1]


def test_a_damaged_file_comes_from_the_store(tmp_path: Path, caplog: object) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        ckpt.save(1, content(1)).wait("committed", DEADLINE_S)
    path = run / "step-000000000001" / "rank-00000-of-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[9000] ^= 1
    path.write_bytes(raw)
    live = content(0)
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        got = ckpt.restore(live)
        assert got == 1
    assert equal(live, 1)
    assert "not intact at level directory" in caplog.text  # type: ignore[attr-defined]


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [None, "wrong", "short"])
def test_what_was_uploaded_whole_is_verified_and_not_uploaded_again(
    tmp_path: Path, damage: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[str] = []
    upload, publish = ObjectSteps.upload, ObjectSteps.publish

    def counted(self: ObjectSteps, step: int, attempt: str, name: str, *rest: Any) -> None:
        uploads.append(name)
        upload(self, step, attempt, name, *rest)

    def fail(self: ObjectSteps, *_: object) -> None:
        raise StorageError("away", errno=errno.EIO, path="")

    monkeypatch.setattr(ObjectSteps, "upload", counted)
    monkeypatch.setattr(ObjectSteps, "publish", fail)
    run = tmp_path / "run"
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        ckpt.save(1, content(1)).wait("committed", DEADLINE_S)
    monkeypatch.setattr(ObjectSteps, "publish", publish)
    (found,) = {*(tmp_path / "bucket").glob("llama/step-*/rank-*")}
    uploads.clear()
    if damage:
        raw = bytearray(found.read_bytes())
        raw[len(raw) // 2] ^= 1
        found.write_bytes(raw[:-1] if damage == "short" else raw)
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        ckpt.flush(DEADLINE_S)
        assert [level.newest for level in ckpt.levels()] == [1, 1]
    assert uploads == ([found.name] if damage else [])
    shutil.rmtree(run)
    live = content(0)
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        got = ckpt.restore(live)
        assert got == 1
    assert equal(live, 1)
    assert len([*(tmp_path / "bucket").glob("llama/step-*")]) == 2  # a directory and its commit


def test_a_store_that_cannot_be_reached_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: ObjectSteps, *_: object) -> None:
        raise StorageError("away", errno=errno.EIO, path="bucket")

    monkeypatch.setattr(ObjectSteps, "steps", fail)
    with statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt:
        with pytest.raises(StorageError, match="try again when it can be read"):
            ckpt.restore(content(0))
        assert [each.msg.split("\n")[0] for each in caplog.records] == [
            "cannot read level %s; continuing without it"
        ]
        caplog.clear()
        ckpt.save(1, content(1)).wait("committed", DEADLINE_S)
        ckpt.flush(DEADLINE_S)
        error = ckpt.levels()[1].error
    assert isinstance(error, StorageError)
    assert caplog.text.count("away") == 1  # flush() and close() tried again, for the same reason
    assert "step 1 did not reach level objects" in caplog.text


def test_a_restart_asks_a_store_that_is_away_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is nearer: it does not matter which steps the store has."""
    run, asked = tmp_path / "run", []
    with statehold.Checkpointer(run, levels=levels(tmp_path), **SMALL) as ckpt:
        ckpt.save(7, content(7)).wait("committed", DEADLINE_S)
    listed = ObjectClient.list

    def counted(self: ObjectClient, *at: str) -> object:
        asked.append(at)
        return listed(self, *at)

    monkeypatch.setattr(ObjectClient, "list", counted)
    monkeypatch.setattr("statehold.steps.objects.ANSWER_S", 1.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ALLOW_HTTP"):
        monkeypatch.setenv(name, "true")
    away = [statehold.Directory(), statehold.ObjectStore("s3://bucket/run", options=CLOSED)]
    live = content(0)
    with statehold.Checkpointer(run, levels=away, **SMALL) as ckpt:
        assert ckpt.restore(live) == 7
        error = ckpt.levels()[1].error
        assert ckpt.steps() == [7]
    assert equal(live, 7)
    assert len(asked) == 1
    assert isinstance(error, UnavailableError)
    assert error.errno == errno.ECONNREFUSED
    assert "cannot read level objects; continuing without it" in caplog.text
    assert "ECONNREFUSED" in caplog.text


def test_a_store_without_ranges_gets_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(self: ObjectClient, name: str, targets: object) -> None:
        raise not_given_back("read", name)

    monkeypatch.setattr(ObjectClient, "fetch", whole)
    with statehold.Checkpointer(tmp_path / "run", levels=levels(tmp_path), **SMALL) as ckpt:
        ckpt.save(1, content(1)).wait("committed", DEADLINE_S)
        ckpt.flush(DEADLINE_S)
        far = ckpt.levels()[1]
    assert far.newest is None
    assert "does not give back parts of objects" in str(far.error)
    assert not [*(tmp_path / "bucket").glob("llama/*.commit")]


def test_a_step_that_cannot_be_removed_keeps_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire, refused = ObjectSteps.retire, list[int]()

    def held(steps: ObjectSteps, step: int) -> None:
        if step == 2:  # as one under a lock of the bucket
            refused.append(step)
            raise StorageError("delete", errno=errno.EPERM, path=steps.path(step))
        retire(steps, step)

    monkeypatch.setattr(ObjectSteps, "retire", held)
    there = levels(tmp_path, every=1, keep=1)
    with statehold.Checkpointer(tmp_path / "run", levels=there, **SMALL) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, {"x": step}).wait("committed", DEADLINE_S)
            settle(ckpt)
        assert inside(ckpt).levels.places[1].steps() == [2, 5]
        assert refused == [2] * 3
        with pytest.raises(StorageError):
            inside(ckpt).levels.places[1].rewind(1)
        assert inside(ckpt).levels.places[1].steps() == [2]
