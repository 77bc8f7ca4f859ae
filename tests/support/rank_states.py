"""A state with values of each kind that ranks have: the same on all of them, and their own."""

from __future__ import annotations

from typing import Any

import torch

from support.faults import must

W, OWN = 1000, 10
SAME_BYTES, OWN_BYTES = 4 * W, 4 * OWN


def state(rank: int, step: int = 0) -> dict[str, Any]:
    """What `rank` saves as `step`."""
    return {
        "w": torch.arange(W, dtype=torch.int32) * 31 + step,
        "own": torch.full((OWN,), rank + 100 * step, dtype=torch.int32),
        "seed": {"rank": rank},
        "step": step,
    }


def blank() -> dict[str, Any]:
    """The same with nothing in it."""
    return {
        "w": torch.zeros(W, dtype=torch.int32),
        "own": torch.zeros(OWN, dtype=torch.int32),
        "seed": {"rank": None},
        "step": None,
    }


def check(found: dict[str, Any], rank: int, step: int) -> None:
    """`found` is what `rank` saved as `step`."""
    expected = state(rank, step)
    must(torch.equal(found["w"], expected["w"]))
    must(torch.equal(found["own"], expected["own"]))
    must((found["seed"], found["step"]) == ({"rank": rank}, step))
