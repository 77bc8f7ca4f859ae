"""What save() calls grows with the state, and not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import statehold
from support.faults import SMALL

STATES: dict[str, Callable[[int], Any]] = {
    "values": lambda n: {f"k{i}": i for i in range(n)},
    "numbers as keys": lambda n: {i: str(i) for i in range(n)},
    "values in a list": lambda n: [float(i) for i in range(n)],
    "dicts of values": lambda n: {f"k{i}": {"a": i, "b": {"c": i}} for i in range(n)},
    "tensors": lambda n: {f"k{i}": torch.zeros(1) for i in range(n)},
    "values beside a tensor": lambda n: {"t": torch.zeros(1), **{f"k{i}": i for i in range(n)}},
    "dicts of a tensor and a value": lambda n: {
        i: {"m": torch.zeros(1), "step": i} for i in range(n)
    },
    "tensors in a list": lambda n: [torch.zeros(1) for _ in range(n)],
}


def calls_of(action: Callable[[], object]) -> int:
    """How many functions it calls, on this thread."""
    count = 0

    def called(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("kind", STATES)
def test_calls_grow_with_the_state(kind: str, tmp_path: Path) -> None:
    def saves(n: int) -> list[int]:
        state = {"s": STATES[kind](n)}
        with statehold.Checkpointer(tmp_path / str(n), **SMALL) as ckpt:
            return [calls_of(lambda step=step: ckpt.save(step, state)) for step in (1, 2)]

    few, some, many = saves(100), saves(400), saves(1600)
    for a, b, c in zip(few, some, many, strict=True):
        assert c - b < 5 * max(b - a, 1000), (few, some, many)
