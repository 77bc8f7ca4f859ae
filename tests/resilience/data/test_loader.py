"""Loader: which batches it gives, and in which order its workers are asked for them.

The workers of these tests are one simulated worker that runs when somebody waits, or when a test
says so. Real processes: test_workers.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from statehold.errors import DatasetError, ImpureSamplesError, UsageError
from statehold.resilience.data import loader as module
from statehold.resilience.data.course import Course
from statehold.resilience.data.draws import Draw
from statehold.resilience.data.loader import Loader, Name
from statehold.resilience.data.purity import Purity
from statehold.tensors.kinds.rng import unchanged

COURSE = Course(size=100, batch=4, microbatches=6, seed=1)


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return COURSE.size

    def __getitem__(self, number: int) -> Any:
        return number, torch.rand(2), numpy.random.random(), random.random()


class OneWorker:
    """Does what Workers do, one call at a time, and only when a test asks."""

    def __init__(self, draw: Draw, *_: Any) -> None:
        self._draw = draw
        self._calls: deque[tuple[Waited, Name]] = deque()
        self._under_way: tuple[Waited, Name] | None = None
        self.begun: list[Name] = []

    def call(self, step: int, index: int) -> Future[Any]:
        self._calls.append((Waited(self), (step, index)))
        return self._calls[-1][0]

    def begin(self) -> bool:
        while self._calls and self._under_way is None:
            future, name = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                self._under_way = future, name
                self.begun.append(name)
        return self._under_way is not None

    def finish(self) -> None:
        if self.begin():
            assert self._under_way is not None
            future, name = self._under_way
            with unchanged():
                future.set_result(self._draw(*name))
            self._under_way = None

    def idle(self) -> None:
        while self.begin():
            self.finish()


class Waited(Future[Any]):
    """A future whose waiter lets the worker go on."""

    def __init__(self, worker: OneWorker) -> None:
        super().__init__()
        self.worker = worker

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self.worker.finish()
        return super().result(0)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> OneWorker:
    """That of the loader which the test makes."""
    made = OneWorker(Draw(Samples(), default_collate, COURSE))
    monkeypatch.setattr(module, "DrawWorkers", lambda *_: made)
    return made


def named(step: int, index: int) -> Any:
    return SimpleNamespace(step=step, index=index)


def equal(one: Any, two: Any) -> bool:
    return all(map(torch.equal, one, two))


def test_a_batch_does_not_depend_on_what_was_expected(worker: OneWorker) -> None:
    ahead, here = Loader(Samples(), COURSE, workers=1), Loader(Samples(), COURSE)
    ahead.expect([(3, index) for index in range(6)])
    for index in (0, 1, 5, 2, 3, 4, 0):
        batch = ahead.batch(named(3, index))
        assert batch[0].tolist() == COURSE.samples(3, index)
        assert equal(batch, here.batch(named(3, index)))
    assert equal(ahead.batch(named(9, 5)), here.batch(named(9, 5)))
    assert not equal(here.batch(named(9, 5))[1:], here.batch(named(9, 4))[1:])


def test_it_draws_in_the_expected_order_and_not_too_far_ahead(worker: OneWorker) -> None:
    loader = Loader(Samples(), COURSE, workers=1, prefetch=3)
    expected = [(0, 4), (0, 0), (0, 3), (1, 1), (1, 2)]
    loader.expect(expected)
    worker.idle()
    assert worker.begun == expected[:3]
    loader.batch(named(0, 4))
    assert worker.begun == expected[:3], "the batch was there"
    worker.idle()
    assert worker.begun == expected[:4]
    for name in expected[1:]:
        loader.batch(named(*name))
    assert worker.begun == expected, "each one once"


def test_a_microbatch_that_nobody_has_announced_goes_first(worker: OneWorker) -> None:
    loader = Loader(Samples(), COURSE, workers=1, prefetch=4)
    loader.expect([(0, index) for index in range(4)])
    worker.begin()
    loader.batch(named(0, 5))
    assert worker.begun == [(0, 0), (0, 5)]
    worker.idle()
    assert worker.begun == [(0, 0), (0, 5), (0, 1), (0, 2), (0, 3)]


def test_a_microbatch_that_is_expected_for_later_can_be_had_now(worker: OneWorker) -> None:
    loader = Loader(Samples(), COURSE, workers=1, prefetch=2)
    loader.expect([(0, index) for index in range(4)])
    worker.begin()
    loader.batch(named(0, 3))
    loader.batch(named(0, 1))
    loader.batch(named(0, 0))
    worker.idle()
    assert worker.begun == [(0, 0), (0, 3), (0, 1), (0, 2)]


def test_after_a_change_of_shares_it_keeps_what_is_still_expected(worker: OneWorker) -> None:
    loader = Loader(Samples(), COURSE, workers=1, prefetch=3)
    loader.expect([(0, 0), (0, 1), (0, 2), (1, 0)])
    worker.finish()
    worker.begin()  # (0, 1) is under way, (0, 2) was asked for, (1, 0) was not
    loader.expect([(0, 5), (0, 0), (0, 1)])
    for index in (5, 0, 1):
        assert loader.batch(named(0, index))[0].tolist() == COURSE.samples(0, index)
    worker.idle()
    assert worker.begun == [(0, 0), (0, 1), (0, 5)]


def test_what_is_not_expected_any_more_is_forgotten(worker: OneWorker) -> None:
    """Also what is drawn or under way: it would take the place of batches that are needed."""
    loader = Loader(Samples(), COURSE, workers=1, prefetch=2)
    loader.expect([(0, 0), (0, 1), (0, 2)])
    worker.finish()
    worker.begin()
    loader.expect([(7, 0), (7, 1), (7, 2)])
    worker.idle()
    assert worker.begun == [(0, 0), (0, 1), (7, 0), (7, 1)]
    loader.batch(named(0, 0))
    assert worker.begun[4:] == [(0, 0)], "drawn again"


NAMES = st.tuples(st.integers(0, 1), st.integers(0, 5))
EVENTS = st.one_of(
    st.tuples(st.just("batch"), NAMES),
    st.tuples(st.just("expect"), st.lists(NAMES, max_size=6)),
    st.sampled_from([("begin", None), ("finish", None), ("idle", None)]),
)


@settings(max_examples=50)
@given(st.lists(EVENTS, max_size=20), st.integers(1, 3))
def test_whatever_is_expected_and_taken(events: list[tuple[str, Any]], prefetch: int) -> None:
    """Each batch is right and comes after at most one draw that was under way. No more is drawn
    ahead than may be, and what was drawn and is still expected is not drawn again."""
    worker = OneWorker(Draw(range(100), tuple, COURSE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DrawWorkers", lambda *_: worker)
        loader = Loader(range(100), COURSE, collate_fn=tuple, workers=1, prefetch=prefetch)
    wanted: list[Name] = []  # what the loader has to draw ahead, in order
    has: set[Name] = set()  # what it has begun and may not begin again
    for event, what in events:
        before = len(worker.begun)
        if event == "batch":
            assert loader.batch(named(*what)) == tuple(COURSE.samples(*what))
            assert worker.begun[before:] in ([], [what]), "nothing else goes first"
            assert (what in has) == (worker.begun[before:] == [])
            has.discard(what)
            wanted = [name for name in wanted if name != what]
        elif event == "expect":
            wanted = list(dict.fromkeys(what))
            loader.expect(wanted)
            has.intersection_update(wanted)
        else:
            getattr(worker, event)()
            new = worker.begun[before:]
            assert new == [name for name in wanted if name not in has][: len(new)]
            has.update(new)
        assert len(has) <= prefetch


def test_the_generators_of_the_trainer_stay_as_they_are() -> None:
    loader = Loader(Samples(), COURSE)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loader.batch(named(0, 0))
    assert torch.equal(torch.rand(3), expected)


def test_a_data_set_may_read_several_samples_at_once() -> None:
    class Several(Samples):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [-number for number in numbers]

    batch = Loader(Several(), COURSE, collate_fn=tuple).batch(named(2, 3))
    assert batch == tuple(-number for number in COURSE.samples(2, 3))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_impure_data_set_is_found(worker: OneWorker, workers: int) -> None:
    """Its second draw, and the first one if another replica has drawn before."""

    class Impure(Samples):
        def __getitem__(self, number: int) -> Any:
            return next(clock) if number == COURSE.samples(4, 2)[3] else number

    clock = iter(range(100))
    worker._draw = Draw(Impure(), default_collate, COURSE)
    purity = Purity(COURSE)
    loader = Loader(Impure(), COURSE, workers=workers, purity=purity)
    loader.batch(named(4, 1))
    loader.batch(named(4, 1))
    loader.batch(named(4, 2))
    with pytest.raises(ImpureSamplesError) as caught:
        loader.batch(named(4, 2))
    assert (caught.value.step, caught.value.index) == (4, 2)
    assert list(caught.value.samples) == COURSE.samples(4, 2)
    purity.learn(4, {3: 1})
    with pytest.raises(ImpureSamplesError):
        loader.batch(named(4, 3))


def test_a_data_set_that_fails_in_the_trainer() -> None:
    class Broken(Samples):
        def __getitem__(self, number: int) -> Any:
            raise FileNotFoundError(2, "no such file", f"shard-{number}")

    with pytest.raises(DatasetError, match="could not be drawn") as caught:
        Loader(Broken(), COURSE).batch(named(2, 1))
    first = COURSE.samples(2, 1)[0]
    assert caught.value.facts["error"] == (
        f"FileNotFoundError: [Errno 2] no such file: 'shard-{first}'"
    )
    assert (caught.value.step, caught.value.index) == (2, 1)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {}, "whose samples have numbers"),
        ({1, 2}, {}, "whose samples have numbers"),
        (range(99), {}, "another number of samples"),
        (range(100), {"workers": -1}, "workers must be"),
        (range(100), {"workers": True}, "workers must be"),
        (range(100), {"prefetch": 0}, "prefetch must be"),
    ],
)
def test_a_loader_that_cannot_be(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(dataset, COURSE, **options)


@pytest.mark.parametrize("name", [(0, 6), (-1, 0)])
def test_a_microbatch_that_there_is_not(name: Name) -> None:
    loader = Loader(Samples(), COURSE)
    with pytest.raises(UsageError):
        loader.batch(named(*name))
    with pytest.raises(UsageError):
        loader.expect([(0, 0), name])
