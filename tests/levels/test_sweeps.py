"""The second run of a sweep: the object store copies what both have, and only the rest goes up.

The runs stay independent. Whatever goes wrong with the copies, the files are uploaded.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.checkpoint.levels.remembered import FILE_NAME
from statehold.errors import StorageError
from statehold.io.objects import client as clients
from statehold.io.objects.client import ObjectClient
from statehold.steps.objects import SHARED
from support.faults import DEADLINE_S, SMALL
from support.levels import settle
from support.sharing import Tuned, same

pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("small_shared_files")


class Run:
    """A run in `folder`/`name`, which copies each step to `folder`/bucket/`name`."""

    def __init__(self, folder: Path, name: str, model: Tuned, parent: Run | None = None) -> None:
        self.run, self.prefix = folder / name, folder / "bucket" / name
        self.model, self.parent = model, parent
        self.expected: dict[int, dict[str, torch.Tensor]] = {}

    def save(self, *steps: int, before: Callable[[], None] = lambda: None) -> None:
        """A job that goes on from the newest step, calls `before`, and saves these steps."""
        self.prefix.parent.mkdir(exist_ok=True)
        far = statehold.ObjectStore(f"file://{self.prefix}", name="far", keep=2)
        levels = [statehold.Directory(keep=2), far]
        parent = None if self.parent is None else f"{self.parent.run}@newest"
        with statehold.Checkpointer(self.run, levels=levels, parent=parent, **SMALL) as ckpt:
            ckpt.restore({"model": self.model})
            before()
            for step in steps:
                ckpt.gate()
                self.model.train_once()
                self.expected[step] = self.model.bits()
                ckpt.save(step, {"model": self.model}).wait("committed", DEADLINE_S)
                settle(ckpt)

    def lose(self) -> None:
        """Everything of the run is gone, on the disk and in the bucket."""
        shutil.rmtree(self.run)
        shutil.rmtree(self.prefix)

    def shared(self) -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in (self.prefix / SHARED).iterdir()}

    def referred(self) -> set[str]:
        found = [json.loads(each.read_bytes()) for each in self.prefix.glob("*/*.shared.json")]
        return {name for each in found for name in each["files"].values()}

    def check(self, steps: set[int]) -> None:
        """These steps, and no others, restore bit for bit from the bucket alone."""
        shutil.rmtree(self.run)
        far = statehold.ObjectStore(f"file://{self.prefix}", name="far", keep=2)
        with statehold.Checkpointer(self.run, levels=[statehold.Directory(keep=2), far]) as ckpt:
            assert set(ckpt.steps()) == steps
            for step in steps:
                model = Tuned()
                assert ckpt.restore({"model": model}, step) == step
                assert same(model.bits(), self.expected[step]), step


@pytest.fixture
def base(tmp_path: Path) -> Run:
    made = Run(tmp_path, "base", Tuned())
    made.save(1, 2)
    return made


@pytest.fixture
def child(tmp_path: Path, base: Run) -> Run:
    return Run(tmp_path, "child", Tuned(), base)


class Requests:
    """Counts copies, and the bytes of uploads; `before` is called ahead of each copy."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: Counter[str] = Counter()
        self.before: Callable[[str], None] = lambda source: None
        copy, upload = ObjectClient.copy, ObjectClient.upload

        def copied(client: ObjectClient, source: str, target: str) -> None:
            self.before(source)
            copy(client, source, target)
            self.made["copies"] += 1

        def uploaded(client: ObjectClient, name: str, size: int, *rest: Any) -> None:
            upload(client, name, size, *rest)
            self.made["bytes"] += size

        patch.setattr(ObjectClient, "copy", copied)
        patch.setattr(ObjectClient, "upload", uploaded)

    @property
    def sent_the_base(self) -> bool:
        return self.made["bytes"] > 4 * 64 * 64 * 4


@pytest.fixture
def requests(base: Run, monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def test_only_what_is_its_own_goes_up(base: Run, child: Run, requests: Requests) -> None:
    child.save(3)
    assert requests.made["copies"] == len(base.shared()) > 0
    assert requests.made["bytes"] < child.model.head.nbytes + 8192
    assert child.shared() == base.shared()
    base.lose()
    child.check({3})


def test_a_parent_outlives_its_child(base: Run, child: Run, requests: Requests) -> None:
    child.save(3)
    assert requests.made["copies"]
    child.lose()
    base.check({1, 2})


@pytest.mark.thorough
def test_each_run_deletes_its_own_objects(base: Run, child: Run, requests: Requests) -> None:
    child.save(3)
    copied = child.shared()

    @torch.no_grad()
    def change() -> None:
        for each in base.model.base:
            each.add_(1.0)

    base.save(*range(4, 10), before=change)  # it retires all that it shared with the child
    assert requests.made["copies"] == len(copied)
    assert not copied.keys() & base.shared().keys()
    child.save(4)
    child.check({3, 4})


def test_objects_that_vanish_meanwhile_are_uploaded(
    base: Run, child: Run, requests: Requests
) -> None:
    def vanish(source: str) -> None:
        requests.made["vanished"] += 1
        shutil.rmtree(base.prefix, ignore_errors=True)

    requests.before = vanish
    child.save(3)
    assert requests.made["vanished"]
    assert not requests.made["copies"]
    assert requests.sent_the_base
    child.check({3})


def test_a_store_that_cannot_copy_gets_uploads(base: Run, child: Run, requests: Requests) -> None:
    def refuse(source: str) -> None:
        requests.made["refused"] += 1
        raise StorageError("cannot copy")

    requests.before = refuse
    child.save(3)
    assert requests.made["refused"]
    assert requests.sent_the_base
    child.check({3})


@pytest.mark.thorough
@pytest.mark.parametrize("note", ["gone", "damaged", "other bucket", "other scheme"])
def test_nobody_is_asked_but_the_store_of_the_run(
    note: str, base: Run, child: Run, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = base.run / FILE_NAME
    if note == "gone":
        path.unlink()
    elif note == "damaged":
        path.write_bytes(b"{")
    else:
        url = "s3://other/base" if note == "other scheme" else "file:///other/base"
        path.write_text(path.read_text().replace(f"file://{base.prefix}", url))
        assert url in path.read_text()
    opened = set[str]()
    real = clients.open_store

    def store(url: str, *options: Any) -> Any:
        opened.add(url)
        return real(url, *options)

    monkeypatch.setattr(clients, "open_store", store)
    child.save(3)
    assert opened == {f"file://{child.prefix}"}
    assert requests.sent_the_base
    child.check({3})


@pytest.mark.thorough
def test_a_death_before_any_change_loses_no_step(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, deaths, died_in_copies = base.shared(), 0, 0
    for at in range(20):
        child = Run(tmp_path, f"child-{at}", Tuned(), base)
        with monkeypatch.context() as patch:
            made = interrupt(patch, at)
            child.save(3)
        committed = set(child.prefix.glob("*.commit"))
        assert base.shared() == before
        child.save(4)
        child.save(5)  # a commit deletes what the retirement before it left
        assert set(child.shared()) == child.referred()
        if len(made) <= at:
            assert committed
            break
        deaths += 1
        died_in_copies += made[at].startswith("copy")
        child.check({4, 5})
    assert 4 < deaths < 19
    assert died_in_copies


def interrupt(patch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Let every operation fail from number `at` on that changes a store."""
    made: list[str] = []

    def dying(name: str) -> None:
        real = getattr(ObjectClient, name)

        def call(client: ObjectClient, path: str, *args: Any) -> Any:
            made.append(f"{name} {path}")
            if len(made) > at:
                raise StorageError("the process is dead")
            return real(client, path, *args)

        patch.setattr(ObjectClient, name, call)

    for name in ("put", "copy", "upload", "delete", "delete_below"):
        dying(name)
    return made
