"""Which parts make up a shared file, and how long a part that changes stays out of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.checkpoint.save.sharing import (
    FILE_BYTES,
    FILE_BYTES_MIN,
    FILES_MAX,
    PART_BYTES_MIN,
    History,
    grouped,
)


@given(st.lists(st.integers(PART_BYTES_MIN, 3 * FILE_BYTES), max_size=300))
def test_files_are_few_and_none_is_small(sizes: list[int]) -> None:
    runs = grouped(sizes)
    if sum(sizes) < FILE_BYTES_MIN:
        assert runs == []
        return
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in run) >= FILE_BYTES_MIN for run in runs)
    assert len(runs) <= FILES_MAX + 1


def test_a_file_has_a_size_that_is_worth_a_name() -> None:
    assert grouped([FILE_BYTES // 4] * 16) == [
        range(4),
        range(4, 8),
        range(8, 12),
        range(12, 16),
    ]


def test_what_is_frozen_may_be_shared_at_once() -> None:
    history: History[str] = History()
    assert not history.same
    history.predict(["base"])
    assert history.same
    assert history.is_quiet("base")
    assert not history.is_quiet("head")


def test_what_stays_the_same_once_may_be_shared() -> None:
    history: History[str] = History()
    history.saved(same=["base"], changed=["head"])
    assert history.is_quiet("base")
    history.saved(same=[], changed=["base"])
    assert not history.is_quiet("base")


@pytest.mark.parametrize("times", [1, 2, 3, 10])
def test_what_changes_in_a_shared_file_has_to_stay_the_same_for_longer(times: int) -> None:
    history: History[str] = History()
    history.predict(["expert"])
    for _ in range(times):
        history.broke(["expert"])
    needed = min(64, 2**times)
    for _ in range(needed - 1):
        history.saved(same=["expert"], changed=[])
        assert not history.is_quiet("expert")
    history.saved(same=["expert"], changed=[])
    assert history.is_quiet("expert")


def test_a_prediction_does_not_outweigh_what_was_seen() -> None:
    history: History[str] = History()
    history.broke(["expert"])
    history.predict(["expert"])
    assert not history.is_quiet("expert")


def test_what_the_state_has_no_longer_is_forgotten() -> None:
    history: History[str] = History()
    history.predict(["a", "b"])
    history.broke(["c"])
    history.keep({"b"})
    assert [history.is_quiet(name) for name in "abc"] == [False, True, False]
    history.predict(["c"])  # as if it were new
    assert history.is_quiet("c")
