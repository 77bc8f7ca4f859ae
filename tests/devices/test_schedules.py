"""Seeded schedules on the emulated device, and that they would find what they are there for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from devices.schedules import BROKEN, finds, play

COUNT = int(os.environ.get("STATEHOLD_DEVICE_SCHEDULES", "20"))


@pytest.mark.thorough
def test_every_step_is_what_was_saved(tmp_path: Path) -> None:
    for seed in range(COUNT):
        play(seed, tmp_path)


# Where the search for a defect begins, if the first schedules cannot find it: that takes a minute.
FIRST = {
    "eager tensors may change before they are copied": 12,
    "replays of captured updates pass the gate": 20,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BROKEN)
def test_a_defect_is_found(tmp_path: Path, name: str) -> None:
    """The threads decide, too, which schedule finds it: one of the next hundred, on most days."""
    first = FIRST.get(name, 0)
    assert finds(name, range(first, first + 1000), tmp_path) is not None
