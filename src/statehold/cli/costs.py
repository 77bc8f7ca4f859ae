"""What the saves of a report cost, in a few figures.

Invariants: pure. A save counts with its slowest rank, because the other ranks wait for it. A
percentile is one of the values (nearest rank), so with fewer than a hundred saves the 99th is the
longest.
Not here: the saves (report), how the figures look (page).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# The times of a save that have percentiles.
TIMES = ("blocked_s", "gate_s", "committed_s")

Save = Mapping[str, Any]


def costs_of(saves: Sequence[Save]) -> dict[str, Any] | None:
    """The figures of saves in the order of their calls; None without a save.

    blocked_share: the time in save() and in the gate, of the time from the call of the first save
    to the call of the last one, whose own cost lies outside; None with fewer than two saves.
    """
    if not saves:
        return None
    begin, end = saves[0]["begin_us"], saves[-1]["begin_us"]
    window_s = max(end - begin, 0) / 1e6
    blocked_s = sum(save["blocked_s"] + save["gate_s"] for save in saves[:-1])
    return {
        "saves": len(saves),
        "failed": sum(save["failed"] for save in saves),
        "window_s": window_s,
        "blocked_share": min(blocked_s / window_s, 1.0) if window_s else None,
        **{name: _spread([save[name] for save in saves if save[name] is not None])
           for name in TIMES},
    }  # fmt: skip


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """The median, the 99th percentile and the largest; None without values."""
    if not values:
        return None
    return {"median": median(values), "p99": percentile(values, 0.99), "max": max(values)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
