"""Fixtures of the checkpointer tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import statehold
from support.faults import SMALL, Holdup


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def small_ckpt(run: Path) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        yield ckpt


@pytest.fixture
def holdup(small_ckpt: statehold.Checkpointer) -> Iterator[Holdup]:
    holdup = Holdup(small_ckpt)
    yield holdup
    holdup.release()
