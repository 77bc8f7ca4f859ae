"""The plot of a run: what blocks, what is durable, what a loop pays, what a restore takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OWN, OTHER = "#c23b22", "#6c8ebf"
Bar = tuple[str, float, tuple[float, float]]
Panel = tuple[str, list[Bar], float | None]  # title, bars, a line across them


def draw(summary: dict[str, Any], titles: dict[str, str], path: Path) -> None:
    """One panel per figure that was measured; error bars are min and max."""
    panels: list[Panel] = [
        ("Trainer blocked by a save (s, log)", bars(summary["save"], "blocked_later_s"), None),
        ("Save until durable (s)", bars(summary["save"], "durable_later_s"), None),
        ("Loop, save every step (x no saves)", bars(summary["train"], "every_1"), 1.0),
        ("Restore, cold (s)", bars(summary["restore"], "cold_s"), None),
        ("Restore, warm (s)", bars(summary["restore"], "warm_s"), None),
    ]
    draw_panels(panels, titles, path)


def draw_panels(panels: list[Panel], titles: dict[str, str], path: Path) -> None:
    """Draw the panels that have bars, below each other."""
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return
    heights = [0.32 * len(bars) + 0.9 for _, bars, _ in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (title, bars, line) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, title, bars, titles, line)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def bars(rows: list[dict[str, Any]], key: str) -> list[Bar]:
    """What was measured of `key`, the largest first."""
    found = []
    for row in rows:
        if value := row.get(key):
            middle = value["median"]
            found.append((row["peer"], middle, (middle - value["min"], value["max"] - middle)))
    return sorted(found, key=lambda bar: -bar[1])


def _panel(
    axis: Any, title: str, bars: list[Bar], titles: dict[str, str], line: float | None
) -> None:
    names = [titles.get(name, name) for name, _, _ in bars]
    colors = [OWN if name.startswith("statehold") else OTHER for name, _, _ in bars]
    errors = [[bar[2][0] for bar in bars], [bar[2][1] for bar in bars]]
    axis.barh(names, [bar[1] for bar in bars], xerr=errors, color=colors, ecolor="#555555")
    axis.set_title(title, loc="left", fontsize=10)
    axis.tick_params(labelsize=8)
    if "log" in title:
        axis.set_xscale("log")
    if line is not None:
        axis.axvline(line, color="#333333", linewidth=0.8)
