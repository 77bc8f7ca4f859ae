"""Real models on four processes; the checks themselves are in support.checkpoint_checks."""

from __future__ import annotations

import pytest

from support.jobs import OK, checks_of, run_job


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_job("support.checkpoint_checks", 4)


@pytest.mark.thorough
@pytest.mark.parametrize("check", checks_of("support.checkpoint_checks"))
def test_on_four_ranks(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == OK, outcomes[check]
