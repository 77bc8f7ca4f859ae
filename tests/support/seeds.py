"""The seed of tests that take another sample every day."""

from __future__ import annotations

import os
import time

DAY_S = 24 * 3600


def seed_of_today() -> int:
    """The same for all tests of a day. Tests print it; STATEHOLD_SEED sets it."""
    return int(os.environ.get("STATEHOLD_SEED") or int(time.time()) // DAY_S)
