"""ExactSum: one set of gradients gives one result, whoever computed which of them, in any order."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from statehold.errors import InvariantError, StateMismatchError, UsageError
from statehold.resilience.sums import exact, pieces
from statehold.resilience.sums.exact import ExactSum
from statehold.resilience.sums.grid import HEADROOM, SPACING, Grid
from support.columns import Column, Lost, bits_of, together

M = 12
SHAPES = {"matrix": (7, 9), "vector": (5,), "scalar": (), "empty": (0, 3), "unused": (4,)}
Gradient = Callable[[int, int, int], Tensor | None]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors have several pieces, and steps several buckets."""
    monkeypatch.setattr(pieces, "_ON_CPU", 16)
    monkeypatch.setattr(exact, "BUCKET_BYTES", 8 * 40)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for name, s in SHAPES.items()}


def gradient(dtype: torch.dtype = torch.float32, octaves: int = 0) -> Gradient:
    """Of (step, microbatch, parameter): the last one has none, and the scalar has some."""

    def of(step: int, index: int, number: int) -> Tensor | None:
        shape = list(SHAPES.values())[number]
        seed = (step * M + index) * len(SHAPES) + number
        if number == 4 or (number == 2 and index % 3):
            return None
        made = torch.Generator().manual_seed(seed)
        exponent = random.Random(seed).uniform(-octaves, octaves)
        return (torch.randn(shape, generator=made, dtype=torch.float64) * 2**exponent).to(dtype)

    return of


class Member:
    """One replica, which is given its gradients instead of computing them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.params = parameters(dtype)
        self.sums = ExactSum(self.params.items(), M)

    def count(self, step: int, share: Sequence[int], of: Gradient) -> None:
        for index in share:
            for number, param in enumerate(self.params.values()):
                param.grad = of(step, index, number)
            self.sums.count(index, torch.tensor(0.1 * index + step))
            assert all(param.grad is None for param in self.params.values())

    def bits(self) -> list[Any]:
        grads = [bits_of(param.grad) for param in self.params.values()]
        bases = self.sums.state_dict()["bases"].tolist()
        return [grads, bases, self.sums.finished.losses, self.sums.finished.mean_loss]


def train(shares_of: Callable[[int], Sequence[Sequence[int]]], of: Gradient, **given: Any) -> list:
    """The bits of each member after each of three steps."""
    members = [Member(**given) for _ in shares_of(0)]
    found = []
    for step in range(3):
        shares = shares_of(step)
        column = Column(len(members), random.Random(step).sample(range(len(shares)), len(shares)))

        def play(number: int, step: int = step, column: Column = column, shares: Any = shares):
            member = members[number]
            member.sums.begin()
            member.count(step, shares[number], of)
            member.sums.reduce(column.start(number))
            member.sums.finish()
            return member.bits()

        found.append(together(play, len(members)))
    return found


def dealt(members: int, seed: int) -> Callable[[int], list[list[int]]]:
    """Shares in random order, some of them empty."""

    def shares(step: int) -> list[list[int]]:
        chance = random.Random(seed * 100 + step)
        found: list[list[int]] = [[] for _ in range(members)]
        for index in chance.sample(range(M), M):
            chance.choice(found).append(index)
        return found

    return shares


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("octaves", [0, 40])
def test_bits_do_not_depend_on_the_members(dtype: torch.dtype, octaves: int) -> None:
    of = gradient(dtype, min(octaves, 12) if dtype is torch.float16 else octaves)
    (alone,), *others = train(dealt(1, 0), of, dtype=dtype)
    for members in (1, 3, 8):
        told = train(dealt(members, seed=members), of, dtype=dtype)
        assert told == [[alone] * members, *([other] * members for (other,) in others)]


def test_copies_count_when_they_are_adopted() -> None:
    """A member computes copies of two shares, and adopts one of them; step after step."""
    of = gradient(octaves=40)
    member, other, expected = Member(), Member(), Member()
    for step in range(3):
        column = Column(2)
        parts = {0: [3, 5], 1: [1, 2, 6], 2: [0, 4]}

        def play(number: int, step: int = step, column: Column = column, parts: Any = parts) -> Any:
            if number:
                other.sums.begin()
                other.count(step, [*parts[2], *range(7, M)], of)
                other.sums.reduce(column.start(number))
                other.sums.finish()
                return other.bits()
            member.sums.begin()
            for copy in (0, 1, 2):
                for index in parts[copy]:
                    member.sums.watch(None, copy)
                    member.count(step, [index], of)
            member.sums.adopt(1)
            member.sums.reduce(column.start(number))
            member.sums.finish()
            return member.bits()

        found = together(play, 2)
        expected.sums.begin()
        expected.count(step, range(M), of)
        expected.sums.reduce(Column(1).start(0))
        expected.sums.finish()
        assert found == [expected.bits()] * 2


def exact_mean(of: Gradient, step: int, number: int) -> list[Fraction]:
    given = [of(step, index, number) for index in range(M)]
    rows = [each.double().reshape(-1).tolist() for each in given if each is not None]
    return [sum(map(Fraction, column)) / M for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("octaves", [0, 6, 40])
def test_the_error_is_bounded(dtype: torch.dtype, octaves: int) -> None:
    """The bound of grid.py, against the exact mean, in steps with and without history."""
    of = gradient(dtype, octaves)
    member, column = Member(dtype), Column(1)
    largest: dict[int, list[Fraction]] = {}
    for step in range(3):
        member.sums.begin()
        member.count(step, range(M), of)
        member.sums.reduce(column.start(0))
        member.sums.finish()
        for number, param in enumerate(member.params.values()):
            if param.grad is None:
                continue
            given = [of(step, index, number) for index in range(M)]
            tops = [each.abs().max() for each in given if each is not None and each.numel()]
            top = max((each.item() for each in tops), default=0)
            largest.setdefault(number, []).append(Fraction(top))
            bound = max(largest[number][-2:]) * Fraction(2) ** (SPACING - Grid(M).bits)
            for got, expected in zip(
                param.grad.double().reshape(-1).tolist(), exact_mean(of, step, number), strict=True
            ):
                place = Fraction(torch.finfo(dtype).eps) * abs(expected) / 2
                assert abs(Fraction(got) - expected) <= bound + place * Fraction(1000001, 1000000)


def test_a_failed_reduction_costs_nothing() -> None:
    """R2. Every operation fails once. Then fewer members, who have counted more, reduce again."""
    of = gradient(octaves=12)
    expected = train(dealt(1, 0), of)[0][0]
    fails_at = 0
    while True:
        members = [Member() for _ in range(3)]
        column = Column(3, fails_at=fails_at)

        def play(number: int, members: list[Member] = members, column: Column = column) -> bool:
            members[number].sums.begin()
            members[number].count(0, range(number, M, 3), of)
            try:
                members[number].sums.reduce(column.start(number))
            except Lost:
                return False
            return True

        if all(together(play, 3)):
            break
        assert column.haunt() > 0
        left = Column(2)

        def again(number: int, members: list[Member] = members, left: Column = left) -> Any:
            members[number].count(0, range(2 + 3 * number, M, 6), of)
            members[number].sums.reduce(left.start(number))
            members[number].sums.finish()
            return members[number].bits()

        assert together(again, 2) == [expected] * 2
        fails_at += 1
    assert fails_at > 5


def test_a_result_may_be_dropped_for_another_one() -> None:
    """A reduction that worked here, but not for all: the share grows, and the members repeat it."""
    of = gradient()
    member = Member()
    member.sums.begin()
    member.count(0, range(5), of)
    member.sums.reduce(Column(1).start(0))
    member.count(0, range(5, M), of)
    member.sums.reduce(Column(1).start(0))
    member.sums.finish()
    expected, _, _ = train(dealt(1, 0), of)
    assert [member.bits()] == expected


def test_what_was_in_p_grad_before_a_step_does_not_count() -> None:
    member = Member()
    for param in member.params.values():
        param.grad = torch.ones_like(param)
    member.sums.begin()
    assert all(param.grad is None for param in member.params.values())


def test_a_joiner_takes_part_with_zeros() -> None:
    of = gradient(octaves=3)
    expected = [alone for (alone,) in train(dealt(1, 0), of)]
    old, new = Member(), Member()
    old.sums.begin()
    old.count(0, range(M), of)
    old.sums.reduce(Column(1).start(0))
    old.sums.finish()
    new.sums.load_state_dict(old.sums.state_dict())
    for step, shares in ((1, [range(M), ()]), (2, [range(4), range(4, M)])):
        column = Column(2)

        def play(number: int, step: int = step, column: Column = column, shares: Any = shares):
            member = (old, new)[number]
            member.sums.begin()
            member.count(step, shares[number], of)
            member.sums.reduce(column.start(number))
            member.sums.finish()
            return member.bits()

        assert together(play, 2) == [expected[step]] * 2


def only(value: Callable[[int, int], float]) -> Gradient:
    """The vector has these values at its second place, and ones."""

    def of(step: int, index: int, number: int) -> Tensor | None:
        if number != 1:
            return None
        made = torch.ones(SHAPES["vector"])
        made[1] = value(step, index)
        return made

    return of


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_on_all_members(value: float) -> None:
    """Of one tensor, in one step; the step after is as if it had not been."""
    of = only(lambda step, index: value if (step, index) == (1, 4) else 1.0)
    for steps in (train(dealt(1, 0), of), train(dealt(4, 1), of)):
        for told in steps[1]:
            grads = told[0]
            nan = torch.frombuffer(bytearray(grads[1]), dtype=torch.float32)
            assert nan.isnan().all()
            assert [grads[0], *grads[2:]] == [None] * 4
        ones = bits_of(torch.ones(SHAPES["vector"]))
        assert all(told[0][1] == ones for step in (0, 2) for told in steps[step])


def spike(growth: int, step: int, index: int) -> float:
    return 2.0**growth if (step, index) == (1, 3) else 1.0


def test_a_larger_gradient_takes_a_second_sum() -> None:
    """Growth within the headroom takes none. No growth changes what counts: the exact mean."""
    for growth, sums in ((HEADROOM - 1, 1), (HEADROOM + 2, 2)):
        of = only(functools.partial(spike, growth))
        member = Member()
        for step in range(2):
            member.sums.begin()
            member.count(step, range(M), of)
            member.sums.reduce(Column(1).start(0))
            own = 8 * 5 * (sums if step else 1)
            assert member.sums.announced_bytes - exact.IN_FLIGHT * 8 * 40 == own
            member.sums.finish()
        grad = member.params["vector"].grad
        assert grad is not None
        assert grad[1] == torch.tensor((2.0**growth + M - 1) / M)


def test_layouts_of_memory() -> None:
    """Gradients that follow their parameter's strides, and such that do not."""
    generator = torch.Generator().manual_seed(1)
    shape = (3, 4, 2, 5)
    param = torch.nn.Parameter(torch.zeros(shape).to(memory_format=torch.channels_last))
    complex_param = torch.nn.Parameter(torch.zeros((3, 2), dtype=torch.complex64).t())
    given = torch.randn(shape, generator=generator)
    complex_given = torch.randn((2, 3), generator=generator, dtype=torch.complex64)
    layouts = [
        given,
        given.to(memory_format=torch.channels_last),
        given.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([given, given], dim=-1)[..., 0],
    ]
    sums = ExactSum([("param", param), ("complex", complex_param)], 1)
    for layout in layouts:
        sums.begin()
        param.grad, complex_param.grad = layout, complex_given
        sums.count(0, None)
        sums.reduce(Column(1).start(0))
        sums.finish()
        assert torch.equal(param.grad, given)
        assert param.grad.stride() == param.stride()
        assert torch.equal(complex_param.grad, complex_given)
    assert math.isnan(sums.finished.mean_loss)


def test_the_mean_loss_has_one_rounding() -> None:
    of = gradient()
    (told,) = train(dealt(1, 0), of)[1]
    losses = [float(torch.tensor(0.1 * index + 1)) for index in range(M)]
    assert told[2] == losses
    assert told[3] == math.fsum(losses) / M


def test_bad_input_is_refused() -> None:
    member = Member()
    member.sums.begin()
    member.count(0, [3], gradient())
    with pytest.raises(InvariantError, match="twice"):
        member.sums.count(3, None)
    with pytest.raises(UsageError, match="no such microbatch"):
        member.sums.count(M, None)
    with pytest.raises(InvariantError, match="not reduced"):
        member.sums.finish()
    with pytest.raises(StateMismatchError, match="another model"):
        member.sums.load_state_dict({"bases": torch.zeros(3, dtype=torch.int64)})
    param = torch.nn.Parameter(torch.zeros(2, 2))
    sums = ExactSum([("table", param)], 1)
    param.grad = torch.eye(2).to_sparse()
    with pytest.raises(UsageError, match="sparse") as caught:
        sums.count(0, None)
    assert caught.value.facts["parameter"] == "table"


def test_members_with_other_bases_or_models_do_not_sum() -> None:
    one, other = Member(), Member()
    bases = one.sums.state_dict()["bases"]
    other.sums.load_state_dict({"bases": bases + 1})
    column = Column(2)

    def play(number: int) -> None:
        with pytest.raises(InvariantError, match="the members differ"):
            (one, other)[number].sums.reduce(column.start(number))

    together(play, 2)
    assert column.counts == [1, 1]


class Interrupting(torch.Tensor):
    """A loss that is asked for its value when Ctrl-C comes, in the middle of count()."""

    def detach(self) -> torch.Tensor:
        raise KeyboardInterrupt


def test_what_a_failed_pass_has_left_does_not_count() -> None:
    """R14. Sums of earlier passes stay, unless some of it has come to them."""
    of, member = gradient(), Member()
    member.sums.begin()
    member.count(0, [0, 1], of)
    member.sums.watch(None)
    member.params["matrix"].grad = torch.ones(SHAPES["matrix"])
    assert member.sums.abandon()
    assert member.params["matrix"].grad is None
    member.count(0, [2], of)
    member.sums.watch(None)
    for number, param in enumerate(member.params.values()):
        param.grad = of(0, 3, number)
    with pytest.raises(KeyboardInterrupt):
        member.sums.count(3, Interrupting())
    assert not member.sums.abandon()
    member.count(0, range(M), of)
    member.sums.reduce(Column(1).start(0))
    member.sums.finish()
    undisturbed = Member()
    undisturbed.sums.begin()
    undisturbed.count(0, range(M), of)
    undisturbed.sums.reduce(Column(1).start(0))
    undisturbed.sums.finish()
    assert [bits_of(each.grad) for each in member.params.values()] == [
        bits_of(each.grad) for each in undisturbed.params.values()
    ]
