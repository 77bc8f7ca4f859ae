"""Settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Shared machines stall for longer than any deadline; a failure prints how to replay it.
settings.register_profile("everyday", deadline=None, print_blob=True)
settings.load_profile("everyday")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-io-uring",
        action="store_true",
        help="as in most containers: io_uring is forbidden, for this process and its children",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-io-uring"):
        from support.seccomp import IO_URING_SETUP, forbid

        forbid(IO_URING_SETUP)
