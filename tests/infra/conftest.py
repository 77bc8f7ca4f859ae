"""Real servers run only under `make infra`; without it these tests are skipped, and counted.

A test names what it needs: `@pytest.mark.programs("slurmctld", "slurmd", root=True)`. Where one of
these programs is missing, or where it may not act as root, it is skipped with that reason.
"""

from __future__ import annotations

import os
import shutil

import pytest

IS_ASKED_FOR = "STATEHOLD_INFRA" in os.environ


def obstacle(item: pytest.Item) -> str | None:
    """Why this test cannot run here."""
    if not IS_ASKED_FOR:
        return "real servers: make infra"
    for mark in item.iter_markers("programs"):
        missing = [name for name in mark.args if shutil.which(name) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if mark.kwargs.get("root") and os.geteuid() != 0:
            return "needs root"
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    if reason := obstacle(item):
        item.add_marker(pytest.mark.skip(reason=reason))
