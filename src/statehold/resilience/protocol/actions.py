"""The actions of one rank in one step, as a generator that its driver executes.

    playing = play(member, lock)          one step; returns its number
    action = next(playing)                Compute, Adopt, Forget, Await, Gather, Fetch, ...
    action = playing.send(result)         or playing.throw(GroupLostError(...)), if one has failed

The trainer executes actions with torch, the simulation with a clock of its own: the order of the
protocol is here once.

Invariants: no microbatch is in the sums of a rank twice. It is computed again only if it is in them
no more. What was reduced under an
epoch that ended is not committed unless another member has committed it.
Not here: promises (member), who the members are (coordinator).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass

from statehold.errors import InvariantError, StateholdError
from statehold.resilience.protocol.member import Member


class GroupLostError(StateholdError):
    """An operation of the groups of an epoch has failed, or the epoch has ended."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward and backward of one microbatch, into the local sums (R1).

    copy: 0, or the sums of their own that copies of another member's share have. The result: False
    if a pass has failed, and the local sums have only what a second try has computed (R14).
    """

    index: int
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Adopt:
    """Add the sums of a copy to those that count: the member whose share it is has been lost."""

    copy: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Clear the local sums: others contribute what this rank has computed in the step."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until an epoch later than `after` is installed (R7)."""

    after: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Have the groups of the epoch (R9). May fail."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Receive the state of the step's beginning from `holders` (R11). May fail."""

    epoch: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum scratch copies over the members (R2). May fail."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank says in the vote (R3): integers below 2**63.

    digest: of the state of the step's beginning (R19). The rank that executes a Vote fills it in.
    """

    epoch: int
    step: int
    count: int
    marks: int
    joiners_wait: int
    digest: int = 0

    def values(self) -> list[int]:
        return [self.epoch, self.step, self.count, self.marks, self.joiners_wait, self.digest]


@dataclass(frozen=True, slots=True)
class Vote:
    """Exchange ballots with all members. The result: the ballots of all replicas. May fail.

    of_all: the digests are of all bytes, because a member has fetched the state in this step (R19).
    """

    epoch: int
    ballot: Ballot
    members: tuple[str, ...]
    of_all: bool


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the job with an error: the state differs from that of most members (R19)."""

    epoch: int


Action = Compute | Adopt | Forget | Await | Gather | Fetch | Reduce | Vote | Depart

_MARKS = 1 << 62


def mark(index: int) -> int:
    """A number of a microbatch whose sum over all microbatches shows that each was counted once."""
    return (index + 1) * 0x9E3779B97F4A7C15 % _MARKS


def play(
    member: Member, lock: contextlib.AbstractContextManager[object], until: int
) -> Generator[Action, object, int | None]:
    """Play the step in progress until it is committed; None if it is `until` or later.

    A failure leads to the next epoch.
    """
    done: set[tuple[int, int]] = set()
    adopted: set[int] = set()
    while True:
        with lock:
            epoch, is_behind, is_changing = member.epoch, member.is_behind, member.is_changing
            missing = [each for each in member.work if each not in done]
            copies = [each for each in member.adopted if each not in adopted]
            is_joiner = member.must_fetch and epoch > 0
            step, is_over = member.step, epoch > 0 and member.step >= until
        if is_over:
            return None
        if is_behind and not is_changing:
            with lock:
                if member.is_changing:
                    continue
                member.catch_up()
            return step
        if done and is_joiner:  # a rank of its replica has not entered the epoch before
            yield Forget()
            done.clear()
            adopted.clear()
        elif missing and not is_behind:
            if (yield Compute(*missing[0])) is False:
                done.clear()
                adopted.clear()
            done.add(missing[0])
        elif is_changing:
            yield Await(epoch)
        elif copies and not is_behind:
            yield Adopt(copies[0])
            adopted.add(copies[0])
        else:
            try:
                yield Gather(epoch)
                if member.must_fetch:
                    with lock:
                        if not member.fetch(epoch):
                            continue
                    yield Fetch(epoch, member.holders)
                    with lock:
                        member.received(epoch)
                    continue
                yield Reduce(epoch)
                with lock:
                    if not member.vote(epoch):
                        continue
                    ballot = _ballot(member, {i for i, copy in done if copy in (0, *adopted)})
                    names, newcomers = member.members, member.newcomers
                ballots = yield Vote(epoch, ballot, names, bool(newcomers))
                assert isinstance(ballots, list)
                _check(ballots, ballot, member.microbatches)
                odd = odd_ones(names, ballots, newcomers)
                if odd:  # nobody commits this step before they have gone
                    yield Depart(epoch) if member.name in odd else Await(epoch)
                    continue
                end_epoch = any(each.joiners_wait for each in ballots)
                with lock:
                    if member.commit(epoch, end_epoch=end_epoch):
                        return step
            except GroupLostError:
                yield Await(epoch)


def _ballot(member: Member, computed: set[int]) -> Ballot:
    marks = sum(map(mark, computed)) % _MARKS
    return Ballot(member.epoch, member.step, len(computed), marks, int(member.joiners_wait))


def odd_ones(
    names: Sequence[str], ballots: Sequence[Ballot], newcomers: Collection[str]
) -> list[str]:
    """R19: the members that are not like most holders of the state; all if there are no most.

    Newcomers do not count: they have the bytes of some holder, which may be the odd one.
    """
    found = {name: ballot.digest for name, ballot in zip(names, ballots, strict=True)}
    if len(set(found.values())) == 1:
        return []
    counts = Counter(digest for name, digest in found.items() if name not in newcomers)
    most = [digest for digest, count in counts.items() if 2 * count > counts.total()]
    return [name for name in names if found[name] not in most]


def _check(ballots: Sequence[Ballot], mine: Ballot, microbatches: int) -> None:
    """Each microbatch is in the sum once, and all speak of the same step."""
    strangers = [each for each in ballots if (each.epoch, each.step) != (mine.epoch, mine.step)]
    count = sum(each.count for each in ballots)
    marks = sum(each.marks for each in ballots) % _MARKS
    expected = sum(map(mark, range(microbatches))) % _MARKS
    if strangers or count != microbatches or marks != expected:
        raise InvariantError(
            "the members have not counted each microbatch once",
            facts={
                "step": mine.step,
                "epoch": mine.epoch,
                "expected": f"{microbatches} microbatches",
                "got": f"{count}",
                "ballots": [each.values() for each in ballots],
            },
        )
