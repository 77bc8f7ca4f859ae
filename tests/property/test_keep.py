"""Which steps a Keep lets stay: a plain second reading of its rules, and what always holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statehold
from statehold import Keep
from statehold.errors import UsageError
from support.keeping import Said, expected

VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0, math.nan, math.inf, -math.inf, None])


@st.composite
def keeps(draw: st.DrawFn) -> Keep:
    best = draw(st.integers(0, 3))
    return Keep(
        last=draw(st.integers(1, 3)),
        every=draw(st.sampled_from([None, 0, 1, 4, 10])),
        best=best,
        metric="loss" if best else None,
        mode=draw(st.sampled_from(["min", "max"])),
        pinned=draw(st.lists(st.sampled_from([0, 3, 7, 99, "good"]), max_size=3)),
    )


@st.composite
def runs(draw: st.DrawFn) -> dict[int, Said | None]:
    """What each step of a run says; None: it cannot be read."""
    found = {}
    for step in sorted(draw(st.sets(st.integers(0, 40), max_size=12))):
        value = draw(VALUES)
        said = Said(
            {} if value is None else {"loss": value}, draw(st.sampled_from([(), ("good",)]))
        )
        found[step] = said if draw(st.integers(0, 9)) else None
    return found


@settings(max_examples=50)
@given(keeps(), runs())
def test_the_rules_say_which_steps_stay(keep: Keep, run: dict[int, Said | None]) -> None:
    kept = keep.of(sorted(run), run.__getitem__)
    assert kept == expected(keep, run)
    assert not run or max(run) in kept
    readable = all(run.values())
    assert keep.most is None or not readable or len(kept) <= keep.most


@settings(max_examples=50)
@given(keeps(), runs(), st.data())
def test_retiring_in_parts_or_at_the_end_is_the_same(
    keep: Keep, run: dict[int, Said | None], data: st.DataObject
) -> None:
    steps = sorted(run)
    kept = keep.of(steps, run.__getitem__)
    left = sorted(
        kept | data.draw(st.sets(st.sampled_from(steps or [0])) if steps else st.just(set()))
    )
    assert keep.of(left, run.__getitem__) == kept  # a crash came between two retirements
    here: list[int] = []
    for step in steps:
        here = sorted(keep.of([*here, step], run.__getitem__))
    assert here == sorted(kept)


def test_nothing_is_asked_that_no_rule_needs() -> None:
    def never(step: int) -> Said:
        raise AssertionError(step)

    assert Keep(last=2, every=10, pinned=[3]).of([3, 4, 11, 20, 21, 22], never) == {
        3,
        11,
        20,
        21,
        22,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"last": 0}, "last must be an integer"),
        ({"last": True}, "last must be an integer"),
        ({"every": -1}, "every must be an integer"),
        ({"every": 1.5}, "every must be an integer"),
        ({"best": 2}, "best and metric belong together"),
        ({"metric": "loss"}, "best and metric belong together"),
        ({"best": 1, "metric": 7}, "best and metric belong together"),
        ({"best": 1, "metric": "loss", "mode": "low"}, "not a valid mode"),
        ({"pinned": "good"}, "pinned must be a list of steps and tags"),
        ({"pinned": [1.5]}, "pinned must be a list of steps and tags"),
        ({"pinned": [True]}, "pinned must be a list of steps and tags"),
        ({"pinned": [""]}, "pinned must be a list of steps and tags"),
        ({"lasst": 3}, "Keep has no such keyword"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Keep(**given)


def test_where_a_keep_is_taken() -> None:
    keep = Keep(last=2, every=100)
    assert statehold.Directory(keep=keep).keep == keep
    assert statehold.ObjectStore("s3://b/p", keep=keep).keep == keep
    assert statehold.Memory(keep=Keep(last=2, best=1, metric="loss")).keep is not None
    for bad in (keep, Keep(pinned=["good"])):
        with pytest.raises(UsageError, match="memory is bounded"):
            statehold.Memory(keep=bad)
    with pytest.raises(UsageError, match="must keep at least 2 steps"):
        statehold.Directory(path="/x", per_host=True, keep=Keep(every=5))
    with pytest.raises(UsageError, match=r"keep=statehold\.Keep"):
        statehold.Checkpointer("run", every=5)  # type: ignore[call-arg]
