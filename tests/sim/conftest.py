"""What tests of the simulation share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_logs() -> Iterator[None]:
    """Faults are many, and every one would be logged."""
    logger = logging.getLogger("statehold")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)
