"""Positions of loaders go to another number of workers, or are refused before anything changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

import statehold
from statehold.errors import StateMismatchError
from support.faults import DEADLINE_S, SMALL

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SAMPLES = torch.arange(32.0)
BATCHES = 8


class Inside:
    """An object with a loader, whose state is a part of its own."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.loader.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["inner"][0])


def made(workers: int, *, inside: bool = False, data: Any = SAMPLES, **options: Any) -> Any:
    options = {"batch_size": 4, "shuffle": True, **options}
    loader = torchdata.StatefulDataLoader(data, num_workers=workers, **options)
    return Inside(loader) if inside else loader


def batches(loader: Any, count: int) -> list[list[float]]:
    """The next batches, over the ends of epochs."""
    found: list[list[float]] = []
    while len(found) < count:
        found += [batch.tolist() for batch in loader]
    return found[:count]


def saved_at(run: Path, loader: Any, at: int) -> list[list[float]]:
    """Save after `at` batches; returns the rest of the epoch."""
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        iterator = iter(loader)
        for _ in range(at):
            next(iterator)
        ckpt.save(at, {"data": loader}).wait("committed", DEADLINE_S)
    return [batch.tolist() for batch in iterator]


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("at", [1, 5, BATCHES])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1), (1, 2)])
def test_another_number_of_workers_goes_on_with_the_same_samples(
    tmp_path: Path, before: int, after: int, at: int, inside: bool
) -> None:
    torch.manual_seed(1)
    expected = saved_at(tmp_path / "run", made(before, inside=inside), at)
    torch.manual_seed(2)
    again = made(after, inside=inside)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        assert ckpt.restore({"data": again}) == at
    found = batches(again, len(expected) + BATCHES)
    assert found[: len(expected)] == expected
    assert (
        sorted(each for batch in found[len(expected) :] for each in batch) == SAMPLES.tolist()
    )  # a whole epoch


class Counted(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset with a state, which each worker has for itself."""

    count = 0

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return SAMPLES[index]

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(SAMPLES)


OTHER: dict[str, tuple[Any, Any]] = {
    "a dataset with a state": (lambda: made(2, data=Counted()), lambda: made(0, data=Counted())),
    "a stream": (
        lambda: made(0, data=Stream(), shuffle=False),
        lambda: made(2, data=Stream(), shuffle=False),
    ),
    "a snapshot at every third batch": (
        lambda: made(2, snapshot_every_n_steps=3),
        lambda: made(0),
    ),
    "no shuffle": (lambda: made(0), lambda: made(0, shuffle=False)),
    "another sampler": (
        lambda: made(2),
        lambda: made(2, shuffle=False, sampler=RandomSampler(SAMPLES)),
    ),
    "the sampler of a rank": (
        lambda: made(0),
        lambda: made(0, shuffle=False, sampler=DistributedSampler(SAMPLES, 2, 0)),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", OTHER)
def test_what_a_loader_cannot_take_is_refused_with_its_name(tmp_path: Path, case: str) -> None:
    before, after = OTHER[case]
    saved_at(tmp_path / "run", before(), 5)
    state = {"data": after(), "step": 0}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore({"data": state["data"]})
        assert "the position of a loader with" in str(caught.value.facts["data"])
        assert 'skip=["data"]' in caught.value.hint
    assert len(batches(state["data"], 3)) == 3
