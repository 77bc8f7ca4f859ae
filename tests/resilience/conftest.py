"""What tests of real replicas compare with."""

from __future__ import annotations

import pytest

from resilience.jobs import UNTIL, Log, undisturbed


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """One replica that nothing happens to, for UNTIL steps."""
    return undisturbed(tmp_path_factory.mktemp("alone") / "run", UNTIL)[0]
