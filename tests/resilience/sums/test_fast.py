"""FastSum: the mean of all gradients, alike on all members; buckets start while the pass runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statehold.errors import InvariantError
from statehold.resilience.sums import fast
from statehold.resilience.sums.fast import FastSum
from statehold.resilience.sums.report import UnlikeError
from support.columns import Column, Lost, bits_of, together

M = 6


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of one layer or so."""
    monkeypatch.setattr(fast, "BUCKET_BYTES", 4 * 72)
    monkeypatch.setattr(fast, "FIRST_BYTES", 4 * 4)


class Model(nn.Module):
    """The second branch is used by odd microbatches only, `never` by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 8)
        self.odd = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def loss(self, index: int) -> Tensor:
        made = torch.Generator().manual_seed(index)
        hidden = self.first(torch.randn((3, 4), generator=made)).tanh()
        if index % 2:
            hidden = self.odd(hidden)
        return self.last(hidden).square().mean()


class Member:
    """agreed: all members have trained all parameters in the step before."""

    def __init__(self, *, agreed: bool = True) -> None:
        self.model = Model()
        self.sums = FastSum(self.model.named_parameters(), M)
        if agreed:
            params = len(list(self.model.parameters()))
            self.sums.load_state_dict({"trained": torch.ones(params, dtype=torch.bool)})

    def compute(self, share: Sequence[int], start: Any = None) -> None:
        """With `start` the last pass is watched."""
        for index in share:
            self.sums.watch(start if index == share[-1] else None)
            loss = self.model.loss(index)
            loss.backward()
            self.sums.count(index, loss)

    def grads(self) -> list[Tensor | None]:
        return [param.grad for param in self.model.parameters()]


def plain() -> tuple[list[Tensor | None], float]:
    """What one process has that adds all gradients, and the mean of the losses."""
    model = Model()
    losses = [model.loss(index) for index in range(M)]
    for loss in losses:
        loss.backward()
    grads = [None if each.grad is None else each.grad / M for each in model.parameters()]
    return grads, math.fsum(loss.item() for loss in losses) / M


def check(members: Sequence[Member]) -> None:
    """All members have the mean, and the same bits."""
    expected, loss = plain()
    for member in members:
        assert member.sums.finished.mean_loss == loss
        assert list(map(bits_of, member.grads())) == list(map(bits_of, members[0].grads()))
        for grad, wanted in zip(member.grads(), expected, strict=True):
            assert (grad is None) == (wanted is None)
            if grad is not None:
                torch.testing.assert_close(grad, wanted)


def step(
    members: Sequence[Member],
    act: Callable[[Member, Any, int], None],
) -> Column:
    column = Column(len(members))

    def play(number: int) -> None:
        member = members[number]
        member.sums.begin()
        act(member, column.start(number), number)
        member.sums.finish()

    together(play, len(members))
    return column


SHARES = {1: [range(M)], 3: [[0, 5], [4, 2], [3, 1]], 4: [[0, 5, 1], [], [2, 4], [3]]}


@pytest.mark.parametrize("size", SHARES)
@pytest.mark.parametrize("watched", [(), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("agreed", [False, True])
def test_all_members_have_the_mean(size: int, watched: tuple[int, ...], *, agreed: bool) -> None:
    """Whoever watches his last pass, and whoever does not, or has none; step after step."""
    members = [Member(agreed=agreed) for _ in range(size)]

    def act(member: Member, start: Any, number: int) -> None:
        member.compute(SHARES[size][number], start if number in watched else None)
        member.sums.reduce(start)

    for _ in range(2):
        step(members, act)
        check(members)


@pytest.mark.parametrize("adopts", [False, True])
def test_copies_count_only_when_they_are_adopted(adopts: bool) -> None:
    """Each member computes a copy of the other's share. One adopts it if the other has nothing."""
    shares = [[0, 5, 4], [2, 3, 1]]
    members = [Member(), Member()]

    def act(member: Member, start: Any, number: int) -> None:
        own, others = ([], []) if adopts and number else (shares[number], shares[1 - number])
        for copy, share in enumerate([own, others]):
            for index in share:
                member.sums.watch(None, copy)
                loss = member.model.loss(index)
                loss.backward()
                member.sums.count(index, loss)
        if adopts and not number:
            member.sums.adopt(1)
        member.sums.reduce(start)

    for _ in range(2):
        step(members, act)
        check(members)


def test_buckets_start_while_the_pass_runs() -> None:
    member, column, seen = Member(), Column(1), []
    member.model.first.weight.register_hook(lambda _: seen.append(column.counts[0]))
    member.sums.begin()
    start = column.start(0)
    member.compute(range(1, M, 2), start)  # odd ones; `never` stops the buckets before it
    assert seen[:-1] == [0, 0]
    assert seen[-1] >= 1
    assert column.counts[0] == seen[-1]
    member.compute([0, 2, 4])
    member.sums.reduce(start)
    member.sums.finish()
    check([member])


def test_a_change_after_the_start_is_noticed_by_all() -> None:
    """One member has a microbatch more after its watched pass: all reduce those buckets again."""
    members = [Member(), Member()]

    def act(member: Member, start: Any, number: int) -> None:
        member.compute([0, 2] if number == 0 else [1, 3, 5], start)
        if number == 0:
            member.compute([4])
        member.sums.reduce(start)

    def undisturbed(member: Member, start: Any, number: int) -> None:
        member.compute([0, 2, 4] if number == 0 else [1, 3, 5], start)
        member.sums.reduce(start)

    column = step(members, act)
    check(members)
    assert len(column.operations) > len(step([Member(), Member()], undisturbed).operations)


@pytest.mark.parametrize("watched", [False, True])
def test_a_failed_reduction_costs_nothing(watched: bool) -> None:
    """Every operation fails once, also in the middle of a pass. Then two members reduce again."""
    fails_at = 0
    while True:
        members = [Member() for _ in range(3)]
        column = Column(3, fails_at=fails_at)

        def play(number: int, members: Any = members, column: Column = column) -> bool:
            start = column.start(number)
            members[number].sums.begin()
            members[number].compute([number, 3 + number], start if watched else None)
            try:
                members[number].sums.reduce(start)
            except Lost:
                return False
            return True

        if all(together(play, 3)):
            break
        left = Column(2)

        def again(number: int, members: Any = members, left: Column = left) -> None:
            members[number].compute([2 + 3 * number], left.start(number) if watched else None)
            members[number].sums.reduce(left.start(number))

        together(again, 2)
        assert column.haunt() > 0
        for member in members[:2]:
            member.sums.finish()
        check(members[:2])
        fails_at += 1
    assert fails_at > 3


@pytest.mark.parametrize("watching", [{0}, {0, 1, 2}])
@pytest.mark.parametrize("watched", [False, True])
def test_what_a_membership_has_summed_ends_with_it(watched: bool, watching: set[int]) -> None:
    """Some of three members sum buckets in their last pass. Then one leaves, and nobody notices."""
    members = [Member() for _ in range(3)]
    three, two = Column(3), Column(2)

    def play(number: int) -> None:
        members[number].sums.begin()
        start = three.start(number) if number in watching else None
        members[number].compute([number, 3 + number], start)

    together(play, 3)
    assert [count > 0 for count in three.counts] == [number in watching for number in range(3)]

    def again(number: int) -> None:
        members[number].compute([2 + 3 * number], two.start(number) if watched else None)
        members[number].sums.reduce(two.start(number))
        members[number].sums.finish()

    together(again, 2)
    check(members[:2])


def test_a_sum_may_be_repeated() -> None:
    """By the same members, for instance because their vote has failed."""
    members = [Member(), Member()]

    def act(member: Member, start: Any, number: int) -> None:
        member.compute(range(number, M, 2), start)
        member.sums.reduce(start)
        member.sums.reduce(start)

    step(members, act)
    check(members)


def test_a_failure_to_start_leaves_the_pass_whole() -> None:
    """`start` raises in a hook. The pass goes on, and `reduce` raises what it was."""
    member, fired = Member(), []

    def start(_: Tensor) -> Any:
        fired.append(1)
        raise Lost("in a hook")

    member.sums.begin()
    member.compute(range(M), start)
    assert fired == [1]
    with pytest.raises(Lost, match="in a hook"):
        member.sums.reduce(start)
    member.sums.reduce(Column(1).start(0))
    member.sums.finish()
    check([member])


def test_what_is_trained_may_change() -> None:
    """Parameters that are frozen have no memory here, until they are trained."""
    member = Member()
    member.model.first.requires_grad_(False)

    def act(member: Member, start: Any, number: int) -> None:
        member.compute(range(M), start)
        member.sums.reduce(start)

    step([member], act)
    frozen = member.sums.announced_bytes
    assert member.model.first.weight.grad is None
    member.model.first.requires_grad_(True)
    member.model.last.bias.grad = torch.ones(2)  # what a user leaves behind is no part of a step
    step([member], act)
    check([member])
    assert member.sums.announced_bytes == frozen + 4 * (32 + 8)
    assert member.sums.announced_bytes == sum(each.nbytes for each in member.model.parameters())


@pytest.mark.parametrize("frozen", [[0], [0, 1]])
@pytest.mark.parametrize("agreed", [False, True])
def test_members_that_train_other_parameters_sum_nothing(
    frozen: Sequence[int], *, agreed: bool
) -> None:
    """All learn it from their reports. Their buckets have one length until then."""
    members = [Member(agreed=agreed) for _ in range(3)]
    for number in frozen:
        members[number].model.odd.requires_grad_(False)
    column = Column(3)

    def play(number: int) -> str:
        start = column.start(number)
        members[number].sums.begin()
        members[number].compute([number, 3 + number], start)
        with pytest.raises(UnlikeError):
            members[number].sums.reduce(start)
        return "refused"

    assert together(play, 3) == ["refused"] * 3
    assert len(set(column.counts)) == 1


def test_members_may_train_others_from_a_step_on() -> None:
    """R19: all at once. A reduction that fails after the report changes nothing."""
    members = [Member(), Member()]
    for each in members:
        each.model.never.requires_grad_(False)
    fails_at = 0
    while True:
        column = Column(2, fails_at=fails_at)

        def play(number: int, column: Column = column, again: bool = fails_at > 0) -> bool:
            start = column.start(number)
            if not again:
                members[number].sums.begin()
                members[number].compute(range(number, M, 2), start)
            try:
                members[number].sums.reduce(start)
            except Lost:
                return False
            return True

        if all(together(play, 2)):
            break
        fails_at += 1
    for each in members:
        each.sums.finish()
    check(members)
    assert members[0].sums.state_dict()["trained"].tolist() == [True] * 4 + [False] * 2 + [True] * 2


def test_types_have_their_buckets() -> None:
    params = [
        nn.Parameter(torch.zeros(3, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
    ]
    sums = FastSum(((str(each.dtype), each) for each in params), 2)
    sums.begin()
    sum(
        each.abs().double().sum() * 0 + (each * 3).real.double().sum() for each in params
    ).backward()
    sums.count(0, None)
    sums.reduce(Column(1).start(0))
    sums.finish()
    for param in params:
        assert param.grad is not None
        assert torch.equal(param.grad, torch.full_like(param, 1.5))


def test_order_of_calls() -> None:
    member = Member()
    member.sums.begin()
    member.compute([2])
    with pytest.raises(InvariantError, match="twice"):
        member.compute([2])
    with pytest.raises(InvariantError, match="not reduced"):
        member.sums.finish()
    member.sums.load_state_dict({})  # of an exact sum
    assert not member.sums.state_dict()["trained"].any()


class OutOfMemory(Exception):
    """What a pass raises in its middle."""


def fail(member: Member, index: int, start: Any = None) -> None:
    """A pass that raises after the layers behind `odd` have their gradients."""

    def raising(_: Tensor) -> None:
        raise OutOfMemory

    member.sums.watch(start)
    hook = member.model.first.weight.register_hook(raising)
    with pytest.raises(OutOfMemory):
        member.model.loss(index).backward()
    hook.remove()
    assert member.model.last.weight.grad is not None
    assert not member.sums.abandon()  # so all passes are repeated


@pytest.mark.parametrize("fails", range(3))
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("watched", [False, True])
def test_a_pass_that_fails_and_is_repeated_counts_once_in_its_turn(
    fails: int, times: int, watched: bool
) -> None:
    """R14. Members that have begun to reduce its buckets learn that these have changed."""
    shares = [[0, 5, 3], [4, 2, 1]]

    def gradients(fails: int | None) -> list[Tensor | None]:
        members = [Member(), Member()]

        def act(member: Member, start: Any, number: int) -> None:
            share, watch = shares[number], start if watched else None
            if number == 0 and fails is not None:
                member.compute(share[:fails])
                for _ in range(times):
                    fail(member, share[fails], watch if fails == 2 else None)
                again = [share[fails], *share[:fails], *share[fails + 1 :]]
                member.compute(again, watch)
            else:
                member.compute(share, watch)
            member.sums.reduce(start)

        step(members, act)
        check(members)
        return members[0].grads()

    assert list(map(bits_of, gradients(fails))) == list(map(bits_of, gradients(None)))


def test_a_failed_copy_leaves_nothing() -> None:
    member = Member()
    member.sums.begin()
    member.compute([0, 1])
    member.sums.watch(None, 1)
    member.model.loss(2).backward()
    member.sums.abandon()
    assert not [each for each in member.grads() if each is not None]
    member.compute(range(M))
    member.sums.reduce(Column(1).start(0))
    member.sums.finish()
    check([member])
