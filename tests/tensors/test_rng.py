"""Rng: every generator goes on with the numbers it would have drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import statehold
from statehold.errors import StateMismatchError, UsageError
from support.faults import DEADLINE_S, SMALL
from support.matching import MemoryStep


def global_draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),  # keeps a second number for the next call
        float(numpy.random.random()),
        float(numpy.random.normal()),
        float(torch.rand(())),
        float(torch.randn(7).sum()),
    ]


def test_the_generators_of_the_process(tmp_path: Path) -> None:
    global_draws()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"rng": statehold.Rng()}).wait("committed", DEADLINE_S)
        expected = [global_draws(), global_draws()]
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
        ckpt.restore({"rng": statehold.Rng()})
    assert [global_draws(), global_draws()] == expected


NAMED: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed),
              lambda g: torch.randn(3, generator=g).tolist()),
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "pcg64": (numpy.random.default_rng, lambda g: g.normal(size=3).tolist()),
    "philox": (lambda seed: numpy.random.Generator(numpy.random.Philox(seed)),
               lambda g: g.normal(size=3).tolist()),
    "mt19937": (lambda seed: numpy.random.Generator(numpy.random.MT19937(seed)),
                lambda g: g.normal(size=3).tolist()),
    "legacy": (numpy.random.RandomState, lambda g: g.normal(size=3).tolist()),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMED)
def test_named_generators(tmp_path: Path, kind: str) -> None:
    make, draw = NAMED[kind]
    generator, fresh = make(1), make(2)
    draw(generator)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        state = {"rng": statehold.Rng(generators={"mine": generator})}
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        expected = [draw(generator) for _ in range(3)]
        ckpt.restore({"rng": statehold.Rng(generators={"mine": fresh})})
    assert [draw(fresh) for _ in range(3)] == expected


def test_saving_and_restoring_draw_nothing() -> None:
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = global_draws()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    step = MemoryStep({"rng": statehold.Rng()})
    step.restore({"rng": statehold.Rng()})
    assert global_draws() == expected


def test_other_generators_than_those_of_the_step() -> None:
    step = MemoryStep({"rng": statehold.Rng({"a": torch.Generator()})})
    for generators in ({}, {"b": torch.Generator()}, {"a": random.Random(0)}):
        with pytest.raises(StateMismatchError) as caught:
            step.restore({"rng": statehold.Rng(generators)})
        assert "'a': 'torch'" in str(caught.value.facts["expected"])


@pytest.mark.parametrize("saved", [statehold.Rng({"a": random.Random(1)}), 3])
def test_other_generators_are_refused_before_anything_changes(tmp_path: Path, saved: Any) -> None:
    live = {"w": torch.zeros(3), "rng": statehold.Rng({"b": random.Random(1)})}
    with statehold.Checkpointer(tmp_path, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(3), "rng": saved}).wait("committed", DEADLINE_S)
        with pytest.raises(StateMismatchError, match="nothing was changed"):
            ckpt.restore(live)
    assert not live["w"].any()


@pytest.mark.parametrize("bad", [random.SystemRandom(), object(), 3])
def test_what_is_no_generator(bad: Any) -> None:
    with pytest.raises(UsageError):
        statehold.Rng({"bad": bad})


class Draws:
    """An object whose loading draws numbers, as building a data loader does."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        torch.rand(5)


def test_generators_are_restored_last() -> None:
    state = {"rng": statehold.Rng(), "loader": Draws()}
    step = MemoryStep(state)
    expected = torch.rand(3)
    step.restore(state)
    assert torch.equal(torch.rand(3), expected)
