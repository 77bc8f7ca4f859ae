"""load() and open() beside a job that retires steps or saves one again, also over NFS: what comes
is of one save, and what is there is found."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import StepNotFoundError, UsageError, storage_error
from statehold.reading.places import StepPlace, file_system
from statehold.steps.publish import directory_id
from statehold.steps.store import Store
from support.faults import DEADLINE_S, SMALL


def content(value: float) -> dict[str, Any]:
    return {"a": torch.full((64,), value), "b": torch.full((64,), value), "value": value}


def saved(run: Path, *saves: tuple[int, float], keep: int = 3) -> Path:
    with statehold.Checkpointer(run, keep=keep, **SMALL) as ckpt:
        for step, value in saves:
            ckpt.save(step, content(value)).wait("committed", DEADLINE_S)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved(tmp_path / "run", (1, 1.0), (2, 2.0))


def retire(run: Path, step: int) -> None:
    shutil.rmtree(run / f"step-{step:012d}")


def values(found: dict[str, Any]) -> set[float]:
    return {found["value"], *found["a"].tolist(), *found["b"].tolist()}


class NfsClient:
    """What an NFS client remembers of directories, until somebody opens the one above them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.remembered: dict[str, os.stat_result | None] = {}
        opened, stat = os.open, os.stat

        def remembering(path: Any, *rest: Any, **named: Any) -> os.stat_result:
            if str(path) not in self.remembered:
                return stat(path, *rest, **named)
            found = self.remembered[str(path)]
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return found

        def asking(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            for each in [each for each in self.remembered if os.path.dirname(each) == str(path)]:
                del self.remembered[each]
            if self.remembered.get(str(path), True) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return opened(path, flags, *rest, **named)

        monkeypatch.setattr(os, "stat", remembering)
        monkeypatch.setattr(os, "open", asking)
        monkeypatch.setattr(os.path, "isdir", lambda path: self.is_dir(str(path)))
        monkeypatch.setattr(os.path, "exists", lambda path: self.is_dir(str(path)))

    def is_dir(self, path: str) -> bool:
        try:
            os.stat(path)
        except OSError:
            return False
        return True


@pytest.mark.parametrize("above", [0, 1])
def test_a_run_that_is_remembered_as_absent_is_found(
    run: Path, monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    """Another host has made it since, or also the directory above it."""
    client = NfsClient(monkeypatch)
    for look in (
        lambda: statehold.load(run)["value"],
        lambda: statehold.open(run).steps()[-1],
        lambda: Store(Remembering(client), str(run)).steps()[-1],
    ):
        for path in (run, *run.parents[:above]):
            client.remembered[str(path)] = None
        assert look() == 2


class Remembering:
    """The file system of a store, as the client sees it."""

    def __init__(self, client: NfsClient) -> None:
        self._client, self._fs = client, file_system()

    def is_dir(self, path: str) -> bool:
        return self._client.is_dir(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def test_a_name_that_no_file_system_has_is_no_run() -> None:
    for name in ("runs/\0", "runs/\udcff@3"):
        with pytest.raises(UsageError):
            statehold.load(name)


def test_a_step_that_is_stale_is_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client still has its attributes, and the server says that it is gone."""
    client, read = NfsClient(monkeypatch), StepPlace.open

    def stale(place: StepPlace, *arguments: Any) -> Any:
        if place.step == 2:
            client.remembered[place.directory] = os.stat(place.directory)
            retire(run, 2)
            raise storage_error("read", errno.ESTALE, f"{place.directory}/manifest.json")
        return read(place, *arguments)

    monkeypatch.setattr(StepPlace, "open", stale)
    assert values(statehold.load(run)) == {1.0}


def test_a_handle_that_is_stale_is_looked_for_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, read = [], StepPlace.open

    def stale(place: StepPlace, *arguments: Any) -> Any:
        calls.append(place.step)
        if len(calls) < 3:
            raise storage_error("read", errno.ESTALE, f"{place.directory}/manifest.json")
        return read(place, *arguments)

    monkeypatch.setattr(StepPlace, "open", stale)
    assert values(statehold.load(run)) == {2.0}
    assert calls == [2, 2, 2]


def test_a_loop_passes_over_a_step_that_is_retired_meanwhile(run: Path) -> None:
    steps = iter(statehold.open(saved(run, (3, 3.0))))
    assert next(steps).step == 1
    retire(run, 2)
    assert [each.step for each in steps] == [3]


def test_the_newest_step_is_looked_for_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, look = statehold.open(run), StepPlace.open

    def late(place: StepPlace, *arguments: Any) -> Any:
        if place.step == 2:
            retire(run, 2)
        return look(place, *arguments)

    monkeypatch.setattr(StepPlace, "open", late)
    newest = opened.newest()
    assert newest is not None
    assert newest.step == 1
    retire(run, 1)
    assert opened.newest() is None
    with pytest.raises(StepNotFoundError):
        opened[1]


@pytest.mark.parametrize("verify", [False, True])
def test_a_step_that_is_retired_before_it_is_mapped(
    run: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    monkeypatch.setattr(torch, "from_file", late(torch.from_file, lambda: retire(run, 2)))
    assert values(statehold.load(run, mapped=True, verify=verify)) == {1.0}


def late(function: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    """`act` happens before the first file is mapped."""
    acts = [act]

    def acting(*arguments: Any, **named: Any) -> Any:
        if acts:
            acts.pop()()
        return function(*arguments, **named)

    return acting


def test_what_is_mapped_is_of_one_save(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is verified, and the manifest is of the save before."""
    before = directory_id(str(run / "step-000000000002"))
    again = late(torch.from_file, lambda: saved(run, (2, 7.0)))
    monkeypatch.setattr(torch, "from_file", again)
    assert values(statehold.load(run, mapped=True, verify=False)) == {7.0}
    assert directory_id(str(run / "step-000000000002")) != before


def test_complex_numbers_are_mapped_where_they_may_begin(tmp_path: Path) -> None:
    state = {"a": torch.ones(1, dtype=torch.float64), "c": torch.arange(5).to(torch.complex128)}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
    found = statehold.load(tmp_path / "run", mapped=True)
    assert torch.equal(found["c"], state["c"])
