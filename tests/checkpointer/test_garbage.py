"""Python's collector and a save: a commit leaves nothing to it, and it does not stop the call."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.checkpoint.save import publishing as team
from support.faults import DEADLINE_S, SMALL, spy_on


def test_the_document_of_a_step_is_gone_when_its_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, seen, at_the_write = team.build_manifest, [], []

    def watched(*args: Any) -> Any:
        manifest = build(*args)
        seen.append(weakref.ref(manifest))
        return manifest

    def before(operation: str, _: tuple[Any, ...]) -> None:
        if operation == "write_file" and seen:
            at_the_write.append(seen[-1]() is None)

    monkeypatch.setattr(team, "build_manifest", watched)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        spy_on(ckpt, before)
        ckpt.save(1, {"w": torch.ones(8)}).wait("committed", DEADLINE_S)
    assert len(seen) == 1
    assert at_the_write[0]


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """One entry for each time that Python looks for garbage: at each new container."""
    found: list[int] = []

    def saw(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    threshold = gc.get_threshold()
    gc.callbacks.append(saw)
    gc.set_threshold(1, 1_000_000, 1_000_000)  # only among the newest objects
    yield found
    gc.set_threshold(*threshold)
    gc.callbacks.remove(saw)
    gc.enable()


class Plain:
    """A value whose state is many containers. It counts the collections meanwhile."""

    def __init__(self, collections: list[int]) -> None:
        self.collections = collections
        self.seen: list[int] = []
        self.failure: type[Exception] | None = None

    def state_dict(self) -> dict[str, Any]:
        before = len(self.collections)
        state = {str(index): [index] for index in range(100)}
        self.seen.append(len(self.collections) - before)
        if self.failure is not None:
            raise self.failure
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_nothing_is_collected_while_a_save_captures(tmp_path: Path, collections: list[int]) -> None:
    plain = Plain(collections)
    plain.state_dict()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"plain": plain}).wait("committed", DEADLINE_S)
    assert plain.seen[0] > 0
    assert set(plain.seen[1:]) == {0}


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("failure", [None, KeyError])
def test_the_collector_is_left_as_it_was(
    tmp_path: Path, collections: list[int], is_on: bool, failure: type[Exception] | None
) -> None:
    plain = Plain(collections)
    plain.failure = failure
    (gc.enable if is_on else gc.disable)()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        try:
            ckpt.save(1, {"plain": plain})
        except KeyError:
            assert failure is KeyError
        else:
            assert failure is None
        assert gc.isenabled() == is_on


class Forking:
    """A data loader that starts its workers in state_dict()."""

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def state_dict(self) -> dict[str, Any]:
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_worker_that_is_forked_meanwhile_has_a_collector(tmp_path: Path) -> None:
    loader = Forking()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"loader": loader}).wait("committed", DEADLINE_S)
    assert loader.exit_code == 0
