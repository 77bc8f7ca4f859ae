"""Shares: which replica contributes which microbatches, before and after a loss.

    fresh(microbatches, members)              the shares of a new step
    stack_of(member, shares, redundancy)      what a member computes in it: its share, and copies
    resolve(microbatches, views, departed)    the step in progress after a change (R8)

Invariants: the shares of a resolution are disjoint and cover all microbatches. A survivor keeps its
share, so that it repeats nothing. It takes over the share of a lost member if it computes a copy of
it. All are pure functions: all members compute the same.
Not here: who the members are (coordinator), and what they do with their shares (actions).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from statehold.errors import InvariantError
from statehold.planners.policies import spread as stacks_of
from statehold.resilience.protocol.messages import View

Share = tuple[int, ...]
Stack = tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The step that the members of an epoch are in.

    holders: the members that hold the state of the step's beginning.
    joiners: the members that receive it from them; they have no share in this step.
    begins: nobody has a share or a stack of this step yet.
    """

    step: int
    shares: Mapping[str, Share]
    holders: tuple[str, ...]
    joiners: tuple[str, ...]
    begins: bool


def fresh(microbatches: int, members: Sequence[str]) -> dict[str, Share]:
    """Equal shares of all microbatches, which differ by one at most."""
    count = len(members)
    return {member: tuple(range(at, microbatches, count)) for at, member in enumerate(members)}


def stack_of(member: str, shares: Mapping[str, Share], redundancy: int) -> Stack:
    """The share of a member, and the shares that it computes copies of; empty without copies.

    Each share is on `redundancy` members, or on all if there are fewer. So any redundancy - 1
    losses leave each share on a member (planners.stacks, after SPARe, arXiv 2603.00357).
    """
    if redundancy == 1:
        return ()
    names = list(shares)
    held = stacks_of(len(names), min(redundancy, len(names))).held(names.index(member))
    return tuple(shares[names[place]] for place in held)


def spread(missing: Iterable[int], shares: Mapping[str, Share]) -> dict[str, Share]:
    """Give each missing microbatch to the smallest share, the first of equals."""
    grown = [list(share) for share in shares.values()]
    smallest = [(len(share), at) for at, share in enumerate(grown)]
    heapq.heapify(smallest)
    for index in sorted(missing):
        size, at = smallest[0]
        grown[at].append(index)
        heapq.heapreplace(smallest, (size + 1, at))
    return {member: tuple(share) for member, share in zip(shares, grown, strict=True)}


def resolve(
    microbatches: int, views: Mapping[str, View], departed: Sequence[View] = ()
) -> Resolution:
    """What the members of a new epoch do next, from the views that they gave with their promises.

    A member whose step is behind has voted in it, and some member has committed it (R3): it
    commits, too, and begins the step in progress.
    """
    holders = _holders(views)
    told = [views[each] for each in holders] + list(departed)
    current = max(view.step for view in told)
    shares = {each: views[each].share if views[each].step == current else () for each in holders}
    counted = [index for share in shares.values() for index in share]
    _each_once(counted, microbatches, current)
    copies = {each: views[each].stack[1:] for each in holders if views[each].step == current}
    begins = not counted and not any(copies.values())
    behind = [views[each] for each in holders if views[each].step < current]
    late = [view for view in behind if not view.voted]
    if late:
        raise InvariantError(
            "a member is behind a committed step that it has not reduced",
            facts={"committed before": str(current), "behind": str(late[0])},
        )
    missing = set(range(microbatches)) - set(counted)
    shares = spread(*_adopted(missing, shares, copies))
    joiners = tuple(each for each in views if each not in shares)
    return Resolution(current, shares, tuple(holders), joiners, begins)


def _adopted(
    missing: set[int], shares: Mapping[str, Share], copies: Mapping[str, Stack]
) -> tuple[set[int], dict[str, Share]]:
    """What is still missing, and the shares, after members have taken over what they copy."""
    grown = dict(shares)
    for member, held in copies.items():
        for copy in held:
            if missing.issuperset(copy):
                missing = missing.difference(copy)
                grown[member] += copy
    return missing, grown


def _holders(views: Mapping[str, View]) -> list[str]:
    """Who holds the state of the run: the members. In a new run, those equal to the furthest."""
    members = [each for each, view in views.items() if view.member]
    if members:
        return members
    furthest = max(view.step for view in views.values())
    digest = next(view.digest for view in views.values() if view.step == furthest)
    return [each for each, view in views.items() if (view.step, view.digest) == (furthest, digest)]


def _each_once(counted: Sequence[int], microbatches: int, current: int) -> None:
    if len(set(counted)) != len(counted) or not set(counted) <= set(range(microbatches)):
        raise InvariantError(
            "members share a microbatch", facts={"step": current, "shares": sorted(counted)}
        )
