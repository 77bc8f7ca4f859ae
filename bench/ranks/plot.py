"""The plot of a run: what a save blocks and takes, what a loop pays, what a restore takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.plot import Panel, bars, draw_panels
from bench.ranks.peers import TITLES


def draw(summary: dict[str, Any], path: Path) -> None:
    """One panel per figure that was measured; error bars are min and max."""
    restores = [
        row | {"peer": f"{row['peer']}: {row['source']} to {row['target']}"}
        for row in summary["restore"]
    ]
    panels: list[Panel] = [
        ("Trainer blocked by a save, last rank (s, log)", bars(summary["save"], "blocked_s"), None),
        ("Save until durable on all ranks (s)", bars(summary["save"], "durable_s"), None),
        ("Loop, save every step (x no saves)", bars(summary["train"], "ratio"), 1.0),
        ("Restore, cold (s)", bars(restores, "cold_s"), None),
        ("Restore, warm (s)", bars(restores, "warm_s"), None),
    ]
    draw_panels(panels, TITLES, path)
