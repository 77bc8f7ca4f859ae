"""Seeds of faults of a store (faults.py): no page is wrong, and no call hangs.

STATEHOLD_PAGE_FAULTS=10000 runs more seeds; STATEHOLD_SEED draws others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kv.faults import FAULTS, run
from support.seeds import SEED

COUNT = int(os.environ.get("STATEHOLD_PAGE_FAULTS", "20"))


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(len(FAULTS)))
def test_no_page_is_wrong_and_no_call_hangs(memory: Path, part: int) -> None:
    memory.mkdir()
    first, fired = (SEED - 1) * 1_000_000 + part, 0
    for seed in range(first, first + COUNT, len(FAULTS)):
        kind, counts = run(seed, memory)
        assert counts["WRONG"] == counts["HUNG"] == 0, (seed, kind, counts)
        fired += counts[kind]
    assert fired
