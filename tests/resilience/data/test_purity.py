"""Checksums of batches, and what a second draw that differs leads to."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from statehold.errors import ImpureSamplesError
from statehold.resilience.data.checksums import checksum
from statehold.resilience.data.course import Course
from statehold.resilience.data.purity import Purity

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


class Other:
    def __init__(self, cache: int) -> None:
        self.cache = cache


def ragged(*parts: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(parts))


DIFFERENT: list[Callable[[], Any]] = [
    lambda: torch.arange(6),
    lambda: torch.arange(6).reshape(2, 3),
    lambda: torch.arange(6).reshape(2, 3).T,
    lambda: torch.arange(6, dtype=torch.int32),
    lambda: torch.arange(6, dtype=torch.float32),
    lambda: torch.tensor([0, 1, 2, 3, 4, 6]),
    lambda: torch.empty(0),
    lambda: torch.tensor([1 + 2j]),
    lambda: torch.tensor([1 + 2j]).conj(),
    lambda: torch.eye(3).to_sparse(),
    lambda: (2 * torch.eye(3)).to_sparse(),
    lambda: ragged(torch.ones(2), torch.ones(3)),
    lambda: ragged(torch.ones(3), torch.ones(2)),
    lambda: torch.empty(3, device="meta"),
    lambda: numpy.arange(6),
    lambda: numpy.arange(6)[::-1],
    lambda: numpy.arange(6, dtype=">i8"),
    lambda: numpy.array(["a", "bc"]),
    lambda: numpy.array(["a", b"bc", None], dtype=object),
    lambda: numpy.array([(1, "a")], dtype=[("x", int), ("y", object)]),
    lambda: numpy.array([(1, "b")], dtype=[("x", int), ("y", object)]),
    lambda: numpy.float32(1),
    lambda: numpy.float64(1),
    lambda: 1,
    lambda: 1.0,
    lambda: True,
    lambda: None,
    lambda: "1",
    lambda: b"1",
    lambda: "\ud800",  # a name of a file that is not UTF-8
    lambda: float("nan"),
    lambda: 0.1,
    lambda: 0.1 + 2**-56,
    lambda: -0.0,
    list,
    tuple,
    lambda: [[]],
    lambda: [1, [2]],
    lambda: [[1], 2],
    lambda: ["ab", "c"],
    lambda: ["a", "bc"],
    lambda: Pair(1, 2),
    lambda: (1, 2),
    lambda: {"x": 1, "y": 2},
    lambda: {"x": 2, "y": 1},
    lambda: UserDict(x=1, y=2),
    lambda: {1, 2},
    lambda: Batch(torch.ones(2), ["a"]),
    lambda: Batch(torch.ones(2), ["b"]),
    lambda: Other(1),
    lambda: Batch,
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_different_batches_have_different_checksums() -> None:
    found = [checksum(make()) for make in DIFFERENT]
    twice = [number for number, each in enumerate(found) if found.index(each) != number]
    assert twice == []
    assert found == [checksum(make()) for make in DIFFERENT]


def test_equal_batches_have_equal_checksums() -> None:
    x = torch.rand(4, 6)
    assert checksum(x) == checksum(x.clone().requires_grad_()) == checksum(torch.nn.Parameter(x))
    assert checksum(x[:, ::2]) == checksum(x[:, ::2].contiguous())
    assert checksum(x.numpy()[:, ::2]) == checksum(x.numpy()[:, ::2].copy())
    assert checksum({"x": 1, "y": 2}) == checksum({"y": 2, "x": 1})
    assert checksum(Other(1)) == checksum(Other(2))


def test_the_order_of_a_set_does_not_count() -> None:
    """That of strings differs by process."""
    one, two = {0, 8}, {8, 0}
    assert list(one) != list(two)
    assert checksum(one) == checksum(two)


def test_an_impure_microbatch_is_found_on_the_replica_that_draws_it_again() -> None:
    course = Course(size=10, batch=4, microbatches=3, seed=1)
    lost, survivor = Purity(course), Purity(course)
    lost.check(5, 2, 0xABC)
    survivor.check(5, 0, 0xDEF)
    survivor.learn(5, lost.drawn(5))
    survivor.check(5, 0, 0xDEF)
    with pytest.raises(ImpureSamplesError, match="drawn twice") as caught:
        survivor.check(5, 2, 0xAB0)
    error = caught.value
    assert (error.step, error.index) == (5, 2)
    assert list(error.samples) == course.samples(5, 2)
    assert error.facts["xxh3-64"] == "first 0000000000000abc, now 0000000000000ab0"
    assert "a generator that the data set has made" in str(error).lower()


def test_what_another_replica_has_drawn_is_compared_at_once() -> None:
    purity = Purity(Course(size=10, batch=4, microbatches=3, seed=1))
    purity.check(5, 2, 1)
    purity.learn(5, {2: 1})
    with pytest.raises(ImpureSamplesError):
        purity.learn(5, {2: 3})


def test_steps_that_are_over_are_forgotten() -> None:
    purity = Purity(Course(size=10, batch=4, microbatches=3, seed=1))
    for step in range(5):
        purity.check(step, 0, step)
    purity.forget(before=4)
    assert [purity.drawn(step) for step in (3, 4)] == [{}, {0: 4}]
    purity.check(3, 0, 99)
