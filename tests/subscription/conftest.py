"""A run that saves, and a subscription to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from support.faults import SMALL
from support.published import content


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ckpt(run: Path) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        yield ckpt


@pytest.fixture
def live() -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in content(0).items()}


@pytest.fixture
def updates(run: Path, live: dict[str, Any]) -> Iterator[statehold.Subscription]:
    with statehold.subscribe(run, {"model": live}) as updates:
        yield updates
