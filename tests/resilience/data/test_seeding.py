"""seed_microbatch: the numbers of a microbatch do not depend on what was drawn before."""

from __future__ import annotations

import random
import sys

import numpy
import pytest
import torch

from statehold.resilience.data.seeding import DRAWING, seed_microbatch
from statehold.tensors.kinds.rng import unchanged


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),  # keeps a second number for the next call
        float(numpy.random.random()),
        float(numpy.random.normal()),
        float(torch.rand(())),
        float(torch.randn(7).sum()),
    ]


def seeded(seed: int, step: int, index: int, purpose: str | None = None) -> list[float]:
    with unchanged():
        seed_microbatch(seed, step, index, *filter(None, [purpose]))
        return draws()


def test_every_generator_begins_again() -> None:
    expected = seeded(1, 2, 3)
    with unchanged():
        draws()
        assert seeded(1, 2, 3) == expected
        seed_microbatch(1, 2, 3)
        draws()
        assert seeded(1, 2, 3) == expected


def test_all_names_have_numbers_of_their_own() -> None:
    names = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (1, 2, 3, DRAWING), (1, 0, 2), (0, 0, 0), (12, 3, 0)]
    found = [number for name in names for number in seeded(*name)]  # type: ignore[arg-type]
    assert len(set(found)) == len(found)


def test_the_numbers_never_change() -> None:
    """Integers: all releases of torch and numpy draw the same ones from the same seed."""
    with unchanged():
        seed_microbatch(1, 2, 3)
        assert torch.randint(2**31, (3,)).tolist() == [2006564536, 1289506801, 505140757]
        assert [random.getrandbits(64) for _ in range(2)] == [
            11165064514625051619,
            6016079303619742371,
        ]
        assert numpy.random.randint(2**31, size=3).tolist() == [1031418616, 1624730278, 1115266155]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("initialised", [False, True])
def test_devices_that_are_in_use(
    kind: str, initialised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeding does not initialise a device that nobody uses."""
    device, seeds = getattr(torch, kind), []
    with unchanged(), monkeypatch.context() as patch:
        patch.setattr(device, "is_initialized", lambda: initialised)
        patch.setattr(device, "manual_seed_all", seeds.append)
        seed_microbatch(1, 2, 3)
        seed_microbatch(1, 2, 3)
    assert len(seeds) == 2 * initialised
    assert len(set(seeds)) == initialised


def test_it_does_not_import_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    with unchanged():
        monkeypatch.delitem(sys.modules, "numpy")
        seed_microbatch(1, 2, 3)
        assert "numpy" not in sys.modules
        monkeypatch.undo()
