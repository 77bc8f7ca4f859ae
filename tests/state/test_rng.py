"""Random numbers after a restore are those that would have come after the save."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from statehold.errors import StateMismatchError, UsageError
from statehold.state.rng import Rng
from support.memory_store import MemoryStep


def draw() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), random.getrandbits(70),
        float(np.random.rand()), float(np.random.randn()),
        torch.rand(3).tolist(), torch.randn(17).tolist(), torch.randint(0, 1 << 40, (2,)).tolist(),
    ]  # fmt: skip


def restored(step: MemoryStep, rng: Rng | None = None) -> None:
    step.restore({"rng": rng or Rng()})


def test_the_numbers_go_on() -> None:
    draw()  # leaves half of a gauss pair behind in each generator
    step = MemoryStep({"rng": Rng()})
    expected = draw()
    draw()
    restored(step)
    assert draw() == expected


def test_saving_draws_nothing() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = draw()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    MemoryStep({"rng": Rng()})
    assert draw() == expected


def test_the_state_is_small_and_has_no_tensors() -> None:
    step = MemoryStep({"rng": Rng()})
    assert step.capture.tensors == []
    assert len(step.manifest.encode()) < 20_000


BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("bits", BITS)
def test_numpy_generators_go_on(bits: Any) -> None:
    generator = np.random.Generator(bits(5))
    generator.integers(0, 10, 3, dtype=np.int32)  # leaves half a word behind
    step = MemoryStep({"rng": Rng({"data": generator})})
    expected = generator.normal(size=5).tolist(), generator.integers(0, 99, 7).tolist()
    fresh = np.random.Generator(bits(6))
    restored(step, Rng({"data": fresh}))
    assert (fresh.normal(size=5).tolist(), fresh.integers(0, 99, 7).tolist()) == expected


def test_named_generators_of_every_kind_go_on() -> None:
    def make(seed: int) -> dict[str, Any]:
        return {"t": torch.Generator().manual_seed(seed), "r": random.Random(seed),
                "l": np.random.RandomState(seed)}  # fmt: skip

    def numbers(of: dict[str, Any]) -> list[Any]:
        return [torch.rand(4, generator=of["t"]).tolist(), of["r"].gauss(0, 1), of["r"].random(),
                of["l"].standard_normal(3).tolist()]  # fmt: skip

    saved = make(1)
    numbers(saved)
    step = MemoryStep({"rng": Rng(saved)})
    expected = numbers(saved)
    live = make(2)
    restored(step, Rng(live))
    assert numbers(live) == expected


def test_generators_have_to_be_the_same_ones() -> None:
    step = MemoryStep({"rng": Rng({"data": torch.Generator()})})
    before = torch.get_rng_state()
    for other in ({}, {"other": torch.Generator()}, {"data": random.Random(1)}):
        torch.rand(1)
        with pytest.raises(StateMismatchError):
            restored(step, Rng(other))
        assert not torch.equal(torch.get_rng_state(), before), "nothing was set back"


def test_generators_are_set_after_everything_that_may_draw() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(100)

    step = MemoryStep({"rng": Rng(), "loader": Loader()})
    expected = torch.rand(3)
    step.restore({"rng": Rng(), "loader": Loader()})
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("generator", [random.SystemRandom(), object(), 5])
def test_what_is_no_generator_is_refused(generator: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Rng({"g": generator})
    assert caught.value.facts["name"] == "g"
