"""What follows a commit fails: the step stays committed, the save says so, and the log says why."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import errors
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside

BOOM = "this fails after the commit"


class Boom:
    """Takes the place of a method; counts how often it was called."""

    def __init__(self) -> None:
        self.fired = 0

    def __call__(self, *_args: Any, **_options: Any) -> None:
        self.fired += 1
        raise OSError(errno.ENOMEM, BOOM)


# What is called on the commit thread after D7, by where it hangs.
LATER: dict[str, Callable[[Any], tuple[object, str]]] = {
    "schedule": lambda opened: (opened.schedule, "committed"),
    "decide": lambda opened: (opened.levels.promotions, "decide"),
    "start": lambda opened: (opened.levels.promotions, "start"),
    "retain": lambda opened: (opened.levels.near[0], "retain"),
    "announce": lambda opened: (opened.pipeline.publisher, "announce"),
    "make_ready": lambda opened: (opened.levels.store, "make_ready"),
}


@pytest.mark.parametrize("name", LATER)
def test_the_step_stays_committed(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        owner, method = LATER[name](inside(ckpt))
        boom = Boom()
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, boom)
            save = ckpt.save(1, {"x": torch.ones(10)}).wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain()
        assert boom.fired == 1
        assert (save.error, save.done("committed")) == (None, True)
        assert ckpt.steps() == [1]
        ckpt.save(2, {"x": torch.ones(10)}).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [1, 2]
    told = [each.getMessage() for each in caplog.records if BOOM in each.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1 is committed and safe; could not ")
    assert "Traceback" in told[0]


def test_a_replaced_step_that_cannot_be_removed_leaves_the_new_one_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with checkpointer_on(SimFs(seed=1), "/run", keep=1, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
        fired = []

        def refuse(*args: Any) -> None:
            fired.append(args)
            raise errors.InvariantError("a check of the native core")

        with monkeypatch.context() as patched:
            patched.setattr(inside(ckpt).levels.store, "_discard", refuse)
            ckpt.save(1, {"x": 2}).wait("committed", DEADLINE_S)
        assert len(fired) == 1
        live = {"x": 0}
        assert ckpt.restore(live) == 1
        assert live == {"x": 2}


def test_an_unforeseen_error_of_the_last_sync_says_that_the_step_is_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        store = inside(ckpt).levels.store
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
        real, fired = store.fs, []

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def sync_dir(self, path: str) -> None:
                if path == store.root and real.is_dir(store.path(2)):
                    fired.append(path)
                    raise MemoryError
                real.sync_dir(path)

        monkeypatch.setattr(store, "fs", Failing())
        with pytest.raises(errors.InvariantError) as caught:
            ckpt.save(2, {"x": 2}).wait("committed", DEADLINE_S)
        assert fired
        assert caught.value.facts["published"].startswith("yes, and whole")
        assert "nothing was published" not in str(caught.value)
        assert caught.value.facts["still safe"] == "step 1 and older"
