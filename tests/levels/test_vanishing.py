"""Listings beside a writer: what was listed may be gone, or another save, when it is looked at."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import statehold
from statehold.checkpoint.levels import promoting
from statehold.checkpoint.levels.hosts.place import HostPlace
from statehold.errors import StorageError
from statehold.steps.publish import LOOKS_MAX, look_beside_a_writer
from statehold.steps.store import Store
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.levels import FAR, NEAR, only, opened_on, save, settle, status


class Retiring:
    """Retires the oldest step of a store once, between the listing of steps and what follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store, fs: SimFs) -> None:
        self.happened = 0
        steps = Store.steps

        def listed(of: Store) -> list[int]:
            found = steps(of)
            if of is store and len(found) > 1 and not self.happened:
                self.happened += 1
                fs.rename(store.path(found[0]), store.path(found[0], ".retired"))
            return found

        monkeypatch.setattr(Store, "steps", listed)


@pytest.fixture
def fs() -> SimFs:
    return SimFs(seed=1)


@pytest.fixture
def ckpt(fs: SimFs) -> Iterator[statehold.Checkpointer]:
    levels = [
        statehold.Directory(path=NEAR, name="near", per_host=True, keep=3),
        statehold.Directory(path="/far", name="far", every=1_000_000),
    ]
    with checkpointer_on(fs, "/run", levels=levels, **SMALL) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, {"w": torch.full((1000,), step)})
        settle(ckpt)
        yield ckpt


@pytest.mark.parametrize("asked", ["steps", "levels", "restore"])
def test_a_step_that_is_retired_while_steps_are_listed(
    ckpt, fs, monkeypatch, asked: str, caplog
) -> None:
    place = inside(ckpt).levels.near[0]
    assert isinstance(place, HostPlace)
    retiring = Retiring(monkeypatch, place.store, fs)
    caplog.clear()
    if asked == "steps":
        steps = ckpt.steps()
        assert 3 in steps
    elif asked == "levels":
        first = ckpt.levels()[0]
        assert (first.newest, first.error) == (3, None)
    else:
        live = {"w": torch.zeros(1000, dtype=torch.int64)}
        got = ckpt.restore(live)
        assert (got, int(live["w"][0])) == (3, 3)
    assert retiring.happened == 1
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_failure_at_one_and_the_same_save_is_raised() -> None:
    looks = []

    def look() -> None:
        looks.append(1)
        raise StorageError("no", errno=errno.EIO)

    with pytest.raises(StorageError, match="EIO"):
        look_beside_a_writer(look, lambda: "the same")
    assert len(looks) == 1


def test_what_is_replaced_is_looked_at_again_and_not_for_ever() -> None:
    saves = iter(range(10_000))
    looks: list[int] = []

    def look() -> int:
        looks.append(1)
        if len(looks) < 5:
            raise StorageError("gone", errno=errno.ENOENT)
        return 7

    got = look_beside_a_writer(look, lambda: next(saves))
    assert got == 7
    assert len(looks) == 5
    looks.clear()

    def fail() -> None:
        looks.append(1)
        raise StorageError("gone", errno=errno.ENOENT)

    with pytest.raises(StorageError, match="ESTALE"):
        look_beside_a_writer(fail, lambda: next(saves), "/run/step")
    assert len(looks) == LOOKS_MAX


def test_what_is_gone_is_nothing() -> None:
    there = iter(["a save", None, None])

    def look() -> None:
        raise StorageError("gone", errno=errno.ENOENT)

    got = look_beside_a_writer(look, lambda: next(there))
    assert got is None


def test_a_step_that_is_saved_again_while_it_is_copied_is_copied_anew(
    fs, monkeypatch, caplog
) -> None:
    """The copy has read one manifest, and meets the files of the next save: that is no damage."""
    again: list[int] = []
    with opened_on(fs) as ckpt:
        part_of = promoting.part_of

        def late(*arguments: Any) -> Any:
            part = part_of(*arguments)
            if not again:
                again.append(2)
                save(ckpt, 1, {"w": torch.full((1000,), 2)})
            return part

        monkeypatch.setattr(promoting, "part_of", late)
        save(ckpt, 1, {"w": torch.full((1000,), 1)})
        ckpt.flush(DEADLINE_S)
        assert again == [2]
        assert status(ckpt).error is None
    assert [each for each in caplog.records if "did not reach" in each.getMessage()] == []
    live = {"w": torch.zeros(1000, dtype=torch.int64)}
    with only(fs, FAR) as ckpt:
        got = ckpt.restore(live)
    assert (got, int(live["w"][0])) == (1, 2)
