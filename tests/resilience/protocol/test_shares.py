"""Shares: each microbatch belongs to one member, and survivors keep theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.errors import InvariantError
from statehold.resilience.protocol import shares as shares_module
from statehold.resilience.protocol.messages import Install, View, decode, encode
from statehold.resilience.protocol.shares import fresh, resolve, spread, stack_of

members = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=8, unique=True)
microbatches = st.integers(1, 40)


def of_all(shares: Mapping[str, tuple[int, ...]]) -> list[int]:
    return sorted(index for share in shares.values() for index in share)


def view(step: int, share: tuple[int, ...], voted: bool = False, member: bool = True) -> View:
    return View(step, voted, share, member, "" if member else "own")


@given(microbatches, members)
def test_fresh_shares_are_equal(count: int, names: list[str]) -> None:
    shares = fresh(count, names)
    assert list(shares) == names
    assert of_all(shares) == list(range(count))
    lengths = {len(share) for share in shares.values()}
    assert max(lengths) - min(lengths) <= 1


@given(microbatches, members)
def test_fresh_shares_are_those_of_one_after_another(count: int, names: list[str]) -> None:
    assert fresh(count, names) == spread(range(count), dict.fromkeys(names, ()))


def test_shares_cost_no_product_of_microbatches_and_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit looked at the share of each member for each microbatch, under a lock."""
    looks: list[int] = []

    def looking(share: Any) -> int:
        looks.append(1)
        return len(share)

    monkeypatch.setattr(shares_module, "len", looking, raising=False)
    names = [f"host-{number}" for number in range(100)]
    spread(range(1000), fresh(1000, names))
    assert len(looks) <= 1000


@given(microbatches, members, st.data())
def test_losses_leave_survivors_what_they_have(
    count: int, names: list[str], data: st.DataObject
) -> None:
    """R8."""
    shares: Mapping[str, tuple[int, ...]] = fresh(count, names)
    alive = list(names)
    while len(alive) > 1:
        gone = data.draw(st.lists(st.sampled_from(alive), min_size=1, unique=True))
        alive = [each for each in alive if each not in gone] or alive[:1]
        before = shares
        views = {each: view(3, shares[each]) for each in alive}
        found = resolve(count, views)
        shares = found.shares
        assert of_all(shares) == list(range(count))
        for each in alive:
            assert shares[each][: len(before[each])] == before[each]
        lengths = [len(share) for share in shares.values()]
        grown = [len(shares[each]) for each in alive if len(shares[each]) > len(before[each])]
        assert not grown or max(grown) - min(lengths) <= 1
        if len(alive) == 1:
            break


@given(microbatches, members)
def test_all_members_compute_the_same_from_what_they_hear(count: int, names: list[str]) -> None:
    shares = fresh(count, names)
    views = {each: view(3, shares[each]) for each in names[: len(names) // 2 + 1]}
    heard = decode(encode(Install(2, views, (view(2, ()),))))
    assert isinstance(heard, Install)
    mine = resolve(count, views, (view(2, ()),))
    theirs = resolve(count, heard.views, heard.departed)
    assert mine == theirs
    assert list(mine.shares) == list(theirs.shares)


def test_missing_microbatches_go_to_the_smallest_shares() -> None:
    shares = {"a": (0, 1), "b": (2,), "c": ()}
    assert spread({3, 4, 5}, shares) == {"a": (0, 1), "b": (2, 4), "c": (3, 5)}


def test_who_is_behind_has_no_share_yet() -> None:
    views = {"a": view(7, (0, 2)), "b": view(6, (1, 3), voted=True)}
    found = resolve(4, views)
    assert found.step == 7
    assert found.shares == {"a": (0, 2), "b": (1, 3)}


def test_one_that_has_left_tells_how_far_the_run_is() -> None:
    found = resolve(2, {"a": view(6, (0,), voted=True)}, (view(7, ()),))
    assert found.step == 7
    assert found.shares == {"a": (0, 1)}


def test_a_joiner_has_no_share_and_holds_nothing() -> None:
    found = resolve(2, {"a": view(6, (0, 1)), "b": view(9, (), member=False)})
    assert (found.step, found.holders, found.joiners) == (6, ("a",), ("b",))
    assert found.shares == {"a": (0, 1)}


def test_a_new_run_begins_at_the_furthest_state() -> None:
    def own(step: int, digest: str) -> View:
        return View(step, digest=digest)

    views = {"a": own(3, "x"), "b": own(5, "y"), "c": own(5, "z"), "d": own(5, "y")}
    found = resolve(2, views)
    assert (found.step, found.holders, found.joiners) == (5, ("b", "d"), ("a", "c"))


@pytest.mark.parametrize("share", [(0, 1), (1, 9), (1, -1)], ids=str)
def test_shares_that_overlap_or_are_of_another_job_are_refused(share: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="share a microbatch"):
        resolve(4, {"a": view(6, (0, 2)), "b": view(6, share)})


@given(microbatches, members, st.integers(2, 9))
def test_each_microbatch_is_computed_by_so_many_members(
    count: int, names: list[str], redundancy: int
) -> None:
    shares = fresh(count, names)
    computed = [
        index for name in names for part in stack_of(name, shares, redundancy) for index in part
    ]
    assert sorted(computed) == sorted([*range(count)] * min(redundancy, len(names)))
    assert all(stack_of(name, shares, redundancy)[0] == shares[name] for name in names)


@given(microbatches, members, st.integers(2, 4), st.data())
def test_fewer_losses_than_copies_leave_nothing_to_compute(
    count: int, names: list[str], redundancy: int, data: st.DataObject
) -> None:
    """One after the other, or several at once: the survivors have computed all of it (SPARe)."""
    shares: Mapping[str, tuple[int, ...]] = fresh(count, names)
    stacks = {name: stack_of(name, shares, redundancy) for name in names}
    losses = min(redundancy, len(names)) - 1
    gone = data.draw(st.lists(st.sampled_from(names), max_size=losses, unique=True))
    for lost in (gone[:1], gone):
        alive = [name for name in names if name not in lost]
        views = {
            name: View(3, False, shares[name], member=True, stack=stacks[name]) for name in alive
        }
        shares = resolve(count, views).shares
        assert of_all(shares) == list(range(count))
        for name in alive:
            assert set(shares[name]) <= {index for part in stacks[name] for index in part}


def test_what_nobody_has_copies_of_is_spread() -> None:
    views = {
        "a": View(3, False, (0, 1), member=True, stack=((0, 1), (2, 3))),
        "b": View(3, False, (4, 5), member=True, stack=((4, 5), (0, 1))),
    }
    found = resolve(8, views)
    assert found.shares == {"a": (0, 1, 2, 3), "b": (4, 5, 6, 7)}
    assert not found.begins
