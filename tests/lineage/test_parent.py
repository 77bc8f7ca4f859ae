"""Checkpointer(parent=...): a run without steps begins with one of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import Checkpointer
from statehold.errors import PeerFailedError, StepNotFoundError, UsageError
from statehold.steps.directories import make_directories
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.plain_runs import (
    BASE,
    CHILD,
    check,
    check_on_ranks,
    content,
    manifest_of,
    save,
    save_on_ranks,
)
from support.rank_states import blank
from support.ranks import Ranks


def opened(fs: SimFs, parent: str, **options: Any) -> Checkpointer:
    return checkpointer_on(fs, CHILD, parent=parent, **SMALL, **options)


@pytest.mark.parametrize("name", [f"{BASE}@2", f"{BASE}@newest"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_parent_that_is_gone_is_named(fs: SimFs, name: str, is_there: bool) -> None:
    if is_there:
        make_directories(fs, BASE)
    with opened(fs, name) as ckpt, pytest.raises(StepNotFoundError) as caught:
        ckpt.restore(content(0))
    found = "no step" if is_there else "no such directory"
    assert caught.value.facts == {"parent": BASE, "found": found}
    assert "statehold tree" in str(caught.value)
    assert not fs.is_dir(CHILD)


@pytest.mark.parametrize(("name", "step"), [(f"{BASE}@2", 2), (f"{BASE}@newest", 3)])
def test_the_first_restore_is_that_of_the_parent(fs: SimFs, name: str, step: int) -> None:
    save(fs, BASE, 1, 2, 3)
    with opened(fs, name) as ckpt:
        live = content(0)
        assert ckpt.restore(live) == step
        assert torch.equal(live["w"], content(step)["w"])
        ckpt.save(10, content(10)).wait("committed", DEADLINE_S)
    assert manifest_of(fs, CHILD, 10).about.parent == manifest_of(fs, CHILD, step).about.parent
    check(fs, CHILD, step, 10)
    check(fs, BASE, 1, 2, 3)


def test_a_run_that_has_steps_goes_on_from_them(fs: SimFs) -> None:
    save(fs, BASE, 1)
    with opened(fs, f"{BASE}@1") as ckpt:
        ckpt.restore(content(0))
        ckpt.save(2, content(2)).wait("committed", DEADLINE_S)
    save(fs, BASE, 5)
    for _ in range(2):  # the same script, started again
        with opened(fs, f"{BASE}@newest") as ckpt:
            assert ckpt.restore(content(0)) == 2
    check(fs, CHILD, 1, 2)


def test_a_run_that_saves_first_begins_with_nothing(fs: SimFs) -> None:
    save(fs, BASE, 1)
    with opened(fs, f"{BASE}@1") as ckpt:
        ckpt.save(7, content(7)).wait("committed", DEADLINE_S)
        assert ckpt.restore(content(0)) == 7
    check(fs, CHILD, 7)


def test_every_rank_gets_it(fs: SimFs) -> None:
    save_on_ranks(fs, 2, BASE, 4)
    with Ranks(fs, 2, CHILD, parent=f"{BASE}@4") as ranks:
        check_on_ranks(ranks, 4)


def test_a_parent_that_is_not_there(fs: SimFs) -> None:
    save(fs, BASE, 1)
    with opened(fs, f"{BASE}@9") as ckpt, pytest.raises(StepNotFoundError, match="1"):
        ckpt.restore(content(0))
    with (
        Ranks(fs, 2, CHILD, parent=f"{BASE}@9") as ranks,
        pytest.raises((StepNotFoundError, PeerFailedError)),
    ):
        ranks.each(lambda rank: ranks.ckpts[rank].restore(blank()))
    check(fs, CHILD)


@pytest.mark.parametrize("parent", ["runs/base@", "runs/base@x", "runs/base@-1", "", "s3://b/x@1"])
def test_a_parent_that_means_no_step(tmp_path: Path, parent: str) -> None:
    with pytest.raises(UsageError):
        statehold.Checkpointer(tmp_path / "child", parent=parent)
