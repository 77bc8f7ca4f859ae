"""A store in files, file:///, after a power cut: what was said to be there is there."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from statehold.errors import StorageError
from statehold.format.saved import MANIFEST_NAME
from statehold.io.objects.client import NEW
from statehold.io.objects.parallel import side_by_side
from statehold.steps.objects import ObjectSteps, commit_name
from support.faults import DEADLINE_S
from support.power import SyncedDisk

FIRST, SECOND = "5f3a09c1-7", "5f3a09c1-8"
DATA = "rank-00000-of-00001.safetensors"
SHARED_DATA = "rank-00000-of-00001-1.safetensors"
OBJECT = f"{'0' * 64}.safetensors"
BYTES_MAX = 1 << 20

After = Callable[[], ObjectSteps]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SyncedDisk:
    (tmp_path / "disk").mkdir()
    return SyncedDisk(tmp_path / "disk", monkeypatch)


@pytest.fixture
def steps(disk: SyncedDisk, tmp_path: Path) -> ObjectSteps:
    return ObjectSteps(f"file://{tmp_path}/disk/two%20words/deep")


@pytest.fixture
def after(disk: SyncedDisk, tmp_path: Path) -> After:
    """Makes the power go off; the store as it is then."""

    def cut() -> ObjectSteps:
        left = disk.cut(tmp_path / "after")
        return ObjectSteps(f"file://{left}/two%20words/deep")

    return cut


def add(steps: ObjectSteps, step: int, attempt: str = FIRST) -> None:
    data = attempt.encode()
    steps.refer(step, attempt, {SHARED_DATA: OBJECT})
    if not steps.shared.has(OBJECT, 4):
        steps.shared.upload(OBJECT, 4, [memoryview(b"both")], lambda _: None)
    steps.upload(step, attempt, DATA, len(data), [memoryview(data)])
    steps.publish(step, attempt, b"manifest of " + data)


def read(steps: ObjectSteps, step: int) -> tuple[bytes, bytes, bytes]:
    own, shared = bytearray(len(FIRST)), bytearray(4)
    manifest = steps.read(step, MANIFEST_NAME, BYTES_MAX)
    steps.fetch(step, DATA, [(0, memoryview(own))])
    steps.fetch(step, SHARED_DATA, [(0, memoryview(shared))])
    return manifest, bytes(own), bytes(shared)


def test_a_published_step_is_whole(steps: ObjectSteps, after: After) -> None:
    add(steps, 7)
    left = after()
    assert left.steps() == [7]
    assert read(left, 7) == (b"manifest of " + FIRST.encode(), FIRST.encode(), b"both")


def test_an_object_gets_its_name_when_its_bytes_are_durable(
    steps: ObjectSteps, disk: SyncedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may leave the new name with no bytes, and take the object that had it before."""
    seen, sync = set[str](), os.fsync

    def look(fd: int) -> None:
        seen.update(path.name for path in disk.undurable())
        sync(fd)

    monkeypatch.setattr(os, "fsync", look)
    add(steps, 7)
    add(steps, 7, SECOND)
    assert seen
    assert {name for name in seen if not name.endswith(NEW)} == set()


@pytest.mark.parametrize("end", ["", "#1"])
@pytest.mark.parametrize("ending", ["publish", "clear"])
def test_what_a_kill_leaves_of_an_object_goes(
    steps: ObjectSteps, ending: str, end: str, tmp_path: Path
) -> None:
    """Before its bytes are durable, and before obstore had all of them. obstore lists only the
    first, and would keep the directories with the second."""
    root = tmp_path / "disk/two words/deep"
    taken, given_up = (f"step-{step:012d}.{FIRST}" for step in (7, 8))
    places = ["", "shared", taken] if ending == "publish" else ["", given_up]
    left = [root / place / f"some.5f3a09c1{NEW}{end}" for place in places]
    others = [root / place / f"notes{NEW}" for place in ("", "shared")]
    for path in left + others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    steps.clear(but_for=7)
    if ending == "publish":
        add(steps, 7)
    assert [path for path in left if path.exists()] == []
    assert [path for path in others if not path.exists()] == []
    assert not (root / given_up).exists()


def test_a_kill_while_bytes_are_taken_leaves_nothing_for_ever(
    steps: ObjectSteps, tmp_path: Path
) -> None:
    child = os.fork()
    if not child:
        blocks = (memoryview(bytes(1 << 20)) if n < 16 else os._exit(0) for n in range(17))
        with contextlib.suppress(BaseException):
            ObjectSteps(steps.where, part_bytes=1 << 20).upload(7, FIRST, DATA, 32 << 20, blocks)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    root = tmp_path / "disk/two words/deep"
    assert [path.name[:-1] for path in root.rglob("*#*")]
    steps.clear()
    assert list(root.rglob("*")) == []


def test_a_step_that_is_saved_again_is_whole(steps: ObjectSteps, after: After) -> None:
    add(steps, 7)
    add(steps, 7, SECOND)
    left = after()
    assert left.steps() == [7]
    assert read(left, 7)[1] == SECOND.encode()


def test_what_a_dead_job_has_left_is_durable_before_it_counts(
    steps: ObjectSteps, after: After, tmp_path: Path
) -> None:
    """The other job was killed when its objects were there, and no sync had ended."""
    directory = tmp_path / "disk/two words/deep" / f"step-{7:012d}.{FIRST}"
    shared = tmp_path / "disk/two words/deep/shared"
    for folder in (directory, shared):
        folder.mkdir(parents=True)
    (directory / DATA).write_bytes(FIRST.encode())
    (shared / OBJECT).write_bytes(b"both")
    assert steps.has(7, FIRST, DATA, len(FIRST))
    steps.refer(7, FIRST, {SHARED_DATA: OBJECT})
    assert steps.shared.has(OBJECT, 4)
    steps.publish(7, FIRST, b"manifest")
    assert read(after(), 7) == (b"manifest", FIRST.encode(), b"both")


def test_a_step_without_its_files_never_comes_back(
    steps: ObjectSteps, after: After, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(steps, 7)
    add(steps, 8, SECOND)
    left = list[ObjectSteps]()
    delete_below = steps.client.delete_below

    def cut(directory: str) -> None:
        delete_below(directory)
        left.append(after())

    monkeypatch.setattr(steps.client, "delete_below", cut)
    steps.retire(7)
    assert [each.steps() for each in left] == [[8]]


def test_bytes_whose_sync_fails_are_not_taken_for_whole_later(
    steps: ObjectSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = list[int]()

    def fail(fd: int) -> None:
        failed.append(fd)
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="make durable"):
            steps.upload(7, FIRST, DATA, 4, [memoryview(b"data")])
    assert failed
    assert not steps.has(7, FIRST, DATA, 4)


@pytest.mark.parametrize("of", ["bytes", "name"])
def test_a_commit_whose_sync_fails_does_not_count(
    steps: ObjectSteps, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its bytes, or of its name: it can be read until the power goes off, so that to read it
    confirms nothing."""
    failed, sync = list[str](), os.fsync

    def fail(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        is_of_bytes = f"{commit_name(7)}." in path
        if is_of_bytes if of == "bytes" else Path(path, commit_name(7)).exists():
            failed.append(path)
            raise OSError(errno.EIO, "injected")
        sync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="make durable"):
            add(steps, 7)
    assert failed
    add(steps, 7)
    assert steps.steps() == [7]


def test_several_ranks_put_one_object_at_once(steps: ObjectSteps, after: After) -> None:
    """Their files of a step may have the same bytes."""
    both = threading.Barrier(2)

    def before(_: int) -> None:
        both.wait(DEADLINE_S)

    def put() -> None:
        steps.shared.upload(OBJECT, 4, [memoryview(b"both")], before)

    side_by_side([put, put], 2)
    add(steps, 7)
    assert read(after(), 7)[2] == b"both"
