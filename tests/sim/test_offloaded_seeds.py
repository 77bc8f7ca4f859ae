"""Some seeds of an offloaded trainer. Many: `make sim SEEDS=1000 ARGS=--offloaded`."""

from __future__ import annotations

from typing import Any

import pytest

from sim.campaign import missing, summary
from sim.offloaded import run_offloaded
from statehold.offload.head import Head
from statehold.steps import store as run_store

SEEDS, FIRST = 6, 100
# What happens in so few seeds, whatever the schedules.
COMMON = {
    "short", "power loss", "failed update", "committed", "linked", "given up", "read again"
}  # fmt: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("no_logs"),
]


@pytest.mark.thorough
def test_seeds() -> None:
    counts, failed = summary(run_offloaded(seed) for seed in range(FIRST, FIRST + SEEDS))
    assert not failed
    assert COMMON.isdisjoint(missing(counts, COMMON))


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "files get no header": (Head, "ranges", []),
    "files are linked before they are durable": (run_store, "sync_all", lambda *_: None),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(*BROKEN[what])
    assert any(run_offloaded(seed).violations for seed in range(FIRST, FIRST + SEEDS))
