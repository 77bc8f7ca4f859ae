"""The seed of every random choice in the tests.

The everyday suite draws the same sample on every day. `make campaigns` sets STATEHOLD_SEED to a new
number and prints it: who sets it again repeats a campaign.
"""

from __future__ import annotations

import os

IS_NEW = "STATEHOLD_SEED" in os.environ
SEED = int(os.environ.get("STATEHOLD_SEED") or 1)
