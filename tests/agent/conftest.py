"""Trainers whose first level is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agents import Server, Trainers


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def trainers(server: Server, tmp_path: Path, memory: Path) -> Iterator[Trainers]:
    trainers = Trainers(server, tmp_path, memory)
    yield trainers
    trainers.close()
