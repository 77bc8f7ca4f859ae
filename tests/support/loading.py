"""A loop over a real data loader: it saves at every step, and resumes from any of them.

The loss of a step depends on the batch, on dropout, and on numbers that the loop draws from Python
and NumPy. Two runs with the same losses, bit for bit, had the same batches and generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import IterableDataset

import statehold
from support.faults import SMALL

BATCHES = 4  # of an epoch
STEPS = 10  # two epochs and a half: a third one begins, in an order of its own
SAMPLES = torch.randn(4 * BATCHES, 8, generator=torch.Generator().manual_seed(7))
BETWEEN = 1000  # the step that is saved after the first epoch, outside its loop
BEFORE = 0  # the step that is saved before the first iter()


class Noisy:
    """A dataset whose transform draws from three generators of the process that loads."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> torch.Tensor:
        return SAMPLES[index] * (random.random() + numpy.random.random()) + torch.rand(8)


class Stream(IterableDataset[torch.Tensor]):
    """The same without a length: torchdata runs through what was used before it goes on."""

    def __iter__(self) -> Any:
        return map(Noisy().__getitem__, range(len(SAMPLES)))


class Loop:
    """A process' run as far as loader and generators go: made anew, it is a restart.

    `seed` differs from run to run, so that whatever is equal afterwards came from the step.
    """

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = make()
        self.losses: dict[int, str] = {}
        self.state = {
            "rng": statehold.Rng(),  # ahead of the loader: the order must not matter
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.loader,
        }

    def train(self, step: int, save: Callable[[int, Any], Any] = lambda *_: None) -> None:
        while step < STEPS:
            for batch in self.loader:
                step += 1
                self.losses[step] = self._update(batch)
                save(step, self.state)
                if step == STEPS:
                    break
            if step == BATCHES:
                save(BETWEEN, self.state)

    def _update(self, batch: torch.Tensor) -> str:
        loss = self.model(batch).pow(2).mean() * (1 + random.random() + numpy.random.random())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return str(loss.item().hex())


def undisturbed(path: Path, make: Callable[[], Any], saved: Iterable[int]) -> dict[int, str]:
    """The losses of a run from its first step to its last, with the steps `saved` below `path`."""
    loop = Loop(make, seed=1)

    def save(step: int, state: Any) -> None:
        if step in saved:
            with statehold.Checkpointer(path / str(step), **SMALL) as ckpt:
                ckpt.save(step, state)

    save(BEFORE, loop.state)
    loop.train(0, save)
    return loop.losses


def restored(ckpt: statehold.Checkpointer, state: Any) -> None:
    ckpt.restore(state)


def resumed(
    path: Path,
    make: Callable[[], Any],
    step: int,
    restore: Callable[[statehold.Checkpointer, Any], None] = restored,
) -> dict[int, str]:
    """The losses of a restart from `step`, to the end."""
    loop = Loop(make, seed=100 + step)
    with statehold.Checkpointer(path / str(step), **SMALL) as ckpt:
        restore(ckpt, loop.state)
        loop.train(BATCHES if step == BETWEEN else step)
    return loop.losses


def check_goes_on(
    path: Path,
    make: Callable[[], Any],
    steps: Iterable[int],
    restore: Callable[[statehold.Checkpointer, Any], None] = restored,
) -> None:
    """Killed after any of the steps, a run goes on as the undisturbed one, bit for bit."""
    whole = undisturbed(path, make, steps)
    for step in steps:
        done = BATCHES if step == BETWEEN else step
        expected = {at: loss for at, loss in whole.items() if at > done}
        found = resumed(path, make, step, restore)
        if not len(expected) == STEPS - done or found != expected:
            raise AssertionError(f"from step {step}: {found} is not {expected}")
