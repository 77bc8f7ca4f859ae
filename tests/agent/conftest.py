"""Trainers whose first level is in memory; skipped, and counted, where there is none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from statehold.io.mounts import mount_of
from support.agents import Server, Trainers


@pytest.fixture
def memory() -> Iterator[Path]:
    if mount_of("/dev/shm").kind != "tmpfs":
        pytest.skip("/dev/shm is no memory file system")
    folder = tempfile.mkdtemp(dir="/dev/shm")
    yield Path(folder, "steps")
    shutil.rmtree(folder)


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
