"""A run to look at: saves and a restore of a small training, with a trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import statehold
from cli.conftest import Asked, ask, golden, run, shared
from support.faults import DEADLINE_S, SMALL
from support.training import Training

__all__ = ["Asked", "Seen", "ask", "copied", "golden", "run", "seen", "shared", "told"]


class Seen(NamedTuple):
    """A run that has saved steps 1 to 3 and keeps 2 and 3, and where its trace lies."""

    run: Path
    trace: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return json.loads(self.trace.read_text())["traceEvents"]


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("seen")
    training = Training()
    options = {**SMALL, "keep": 2, "trace": folder / "trace.json"}
    with statehold.Checkpointer(folder / "run", **options) as ckpt:
        for step in (1, 2, 3):
            training.step()
            ckpt.save(step, training.state).wait("committed", DEADLINE_S)
        ckpt.restore(training.state)
    return Seen(folder / "run", folder / "trace.json")


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    """What the logger says from INFO on."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("statehold")
    handler.emit = records.append  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at two levels whose step 1 was copied, and its trace."""
    folder = tmp_path_factory.mktemp("copied")
    levels = [statehold.Directory(), statehold.Directory(path=folder / "far", name="far")]
    with statehold.Checkpointer(
        folder / "run", levels=levels, trace=folder / "trace.json", **SMALL
    ) as ckpt:
        ckpt.save(1, {"w": torch.arange(1 << 20, dtype=torch.int32)}).wait("committed", DEADLINE_S)
    return folder
