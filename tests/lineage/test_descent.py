"""Each step of a run says which step of another run it all began from."""

from __future__ import annotations

import pytest

from statehold.checkpoint.levels.forking import fork
from statehold.format.entries import Origin
from support.in_memory import SimFs
from support.levels import step_path
from support.plain_runs import BASE, CHILD, check, manifest_of, save, save_on_ranks


@pytest.fixture
def parent(fs: SimFs) -> Origin:
    save(fs, BASE, 1)
    return fork(fs, step_path(BASE, 1), CHILD).parent


def test_steps_of_later_jobs_know_it_when_the_first_one_is_gone(fs: SimFs, parent: Origin) -> None:
    save(fs, CHILD, 2, 3, keep=1)
    save(fs, CHILD, 4, keep=1)
    assert manifest_of(fs, CHILD, 4).about.parent == parent
    check(fs, CHILD, 4)


def test_a_damaged_step_is_not_the_only_one_that_knows(fs: SimFs, parent: Origin) -> None:
    save(fs, CHILD, 2)
    fs.write_file(f"{step_path(CHILD, 2)}/manifest.json", b"damaged")
    save(fs, CHILD, 3)
    assert manifest_of(fs, CHILD, 3).about.parent == parent


def test_a_run_that_began_with_nothing_says_nothing(fs: SimFs) -> None:
    save(fs, BASE, 1, 2)
    save(fs, BASE, 3)
    assert not manifest_of(fs, BASE, 3).about
    assert manifest_of(fs, BASE, 3).version == 1


def test_a_run_of_several_ranks(fs: SimFs) -> None:
    save_on_ranks(fs, 2, BASE, 1)
    parent = fork(fs, step_path(BASE, 1), CHILD).parent
    save_on_ranks(fs, 2, CHILD, 2)
    found = manifest_of(fs, CHILD, 2)
    assert (found.version, found.about.parent) == (5, parent)
