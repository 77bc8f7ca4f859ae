"""Fixtures of the tests of real processes and real file systems."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faulty import compile_into, compiler
from support.victims import Victims


@pytest.fixture(scope="session")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    if compiler() is None:
        pytest.skip("standing before libc needs a C compiler")
    victims = Victims(compile_into(tmp_path_factory.mktemp("faulty")))
    yield victims
    victims.close()


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of syncs would otherwise take minutes."""
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
