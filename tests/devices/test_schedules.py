"""Seeded schedules on the emulated device, and that they would find what they are there for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from devices.schedules import BROKEN, finds, play

COUNT = int(os.environ.get("STATEHOLD_DEVICE_SCHEDULES", "30"))


def test_every_step_is_what_was_saved(tmp_path: Path) -> None:
    for seed in range(COUNT):
        play(seed, tmp_path)


@pytest.mark.parametrize("name", BROKEN)
def test_a_defect_is_found(tmp_path: Path, name: str) -> None:
    assert finds(name, range(100), tmp_path) is not None
