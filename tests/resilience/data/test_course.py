"""Course: each sample once in each epoch, whoever computes which microbatch; bad input by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statehold.errors import UsageError
from statehold.resilience.data.course import Course

sizes = st.integers(1, 60)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 80), st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_each_epoch_has_each_sample_once(
    size: int, batch: int, microbatches: int, seed: int
) -> None:
    """Also where a batch is larger than an epoch, and begins and ends inside of one."""
    course = Course(size, batch, microbatches, seed)
    drawn: list[int] = []
    steps = -(-3 * size // (batch * microbatches))
    for each in range(steps):
        for index in range(microbatches):
            samples = course.samples(each, index)
            assert len(samples) == batch
            drawn += samples
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_batch_spans_epochs() -> None:
    course = Course(size=10, batch=4, microbatches=1, seed=1)
    first = [4, 7, 0, 1, 6, 3, 2, 5, 9, 8]
    second = [5, 1, 4, 0, 8, 7, 6, 2, 3, 9]
    assert course.samples(2, 0) == first[8:] + second[:2]


def test_the_samples_never_change() -> None:
    course = Course(size=1000, batch=8, microbatches=4, seed=1)
    assert course.samples(0, 0) == [63, 236, 55, 287, 551, 308, 25, 903]
    assert course.samples(31, 1) == [387, 619, 115, 539, 931, 510, 6, 516]


def test_the_samples_of_a_step_do_not_depend_on_how_it_is_cut() -> None:
    """The same global batch in 6 microbatches, or in 2 of three times the size."""
    small, large = Course(100, 4, 6, seed=9), Course(100, 12, 2, seed=9)
    for step in range(7):
        one = [sample for index in range(6) for sample in small.samples(step, index)]
        assert one == [sample for index in range(2) for sample in large.samples(step, index)]


def test_the_largest_course() -> None:
    course = Course(2**63, 2, 2**31, seed=2**64 - 1)
    assert all(0 <= sample < 2**63 for sample in course.samples(2**63, 2**31 - 1))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"size": 0}, "the number of samples"),
        ({"size": 2**63 + 1}, "the number of samples"),
        ({"batch": 0}, "batch"),
        ({"batch": 8.0}, "batch"),
        ({"microbatches": -1}, "microbatches"),
        ({"microbatches": True}, "microbatches"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
    ],
)
def test_a_course_that_cannot_be(wrong: dict[str, Any], name: str) -> None:
    good = {"size": 100, "batch": 8, "microbatches": 4, "seed": 1}
    with pytest.raises(UsageError, match=f"^{name} must be an integer from") as caught:
        Course(**(good | wrong))
    assert caught.value.facts == {"got": repr(*wrong.values())}


@pytest.mark.parametrize(
    ("step", "index", "name"),
    [(-1, 0, "step"), (0, 4, "index"), (0, -1, "index"), ("0", 0, "step")],
)
def test_a_microbatch_that_there_is_not(step: Any, index: int, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Course(100, 8, 4, seed=1).samples(step, index)
