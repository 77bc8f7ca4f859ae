"""Which steps a Keep lets stay: a plain second reading of its rules, and what always holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import statehold
from statehold import Keep
from statehold.errors import UsageError

VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0, math.nan, math.inf, -math.inf, None])


@dataclass
class Said:
    metrics: dict[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


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


def expected(keep: Keep, run: dict[int, Said | None]) -> set[int]:
    """The rules, one step at a time."""
    steps, found = sorted(run), set()
    asks = bool(keep.best) or "good" in keep.pinned
    for step in steps:
        said = run[step]
        newer = [each for each in steps if each > step]
        is_first = bool(keep.every) and step >= (keep.every or 0)
        for other in steps:
            is_first &= other >= step or other // (keep.every or 1) != step // (keep.every or 1)
        is_unknown = said is None and asks
        is_tagged = said is not None and "good" in said.tags and "good" in keep.pinned
        is_named = len(newer) < keep.last or is_first or step in keep.pinned or is_tagged
        if is_named or is_unknown or _is_best(keep, run, step):
            found.add(step)
    return found


def _is_best(keep: Keep, run: dict[int, Said | None], step: int) -> bool:
    said = run[step]
    if said is None or not math.isfinite(said.metrics.get("loss", math.nan)):
        return False
    return len(_better(keep, run, step)) < keep.best


def _better(keep: Keep, run: dict[int, Said | None], step: int) -> list[int]:
    sign = -1 if keep.mode == "max" else 1

    def rank(each: int) -> tuple[float, int]:
        said = run[each]
        value = said.metrics.get("loss", math.nan) if said else math.nan
        return (sign * value if math.isfinite(value) else math.inf), each

    return [each for each in run if rank(each) < rank(step)]


@given(keeps(), runs())
def test_the_rules_say_which_steps_stay(keep: Keep, run: dict[int, Said | None]) -> None:
    kept = keep.of(sorted(run), run.__getitem__)
    assert kept == expected(keep, run)
    assert not run or max(run) in kept
    readable = all(run.values())
    assert keep.most is None or not readable or len(kept) <= keep.most


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
        ({"last": 0}, "last must be a number"),
        ({"last": True}, "last must be a number"),
        ({"every": -1}, "every must be a number"),
        ({"every": 1.5}, "every must be a number"),
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
    with pytest.raises(UsageError, match="keep=statehold.Keep"):
        statehold.Checkpointer("run", every=5)  # type: ignore[call-arg]
