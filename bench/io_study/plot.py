"""The plot of a study: the rates of every strategy, and the effect of each setting.

Invariants: only this module needs matplotlib, and imports it when something is drawn.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from bench.io_study.alternatives import Alternative
from statehold.cli.bench import Study
from statehold.cli.study.strategies import JUDGED, Strategy, StudyFigures
from statehold.units import MiB

_OWN, _BYTES, _OTHER = "#c23b22", "#6c8ebf", "#b0b0b0"
_ROW_INCHES = 0.21
_MARKS = "osD"


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(study: Study, path: Path) -> None:
    """Bars for all strategies above, lines for block size and depth below."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    rows = len(study.figures.strategies())
    height = 1.2 + _ROW_INCHES * rows
    figure = pyplot.figure(figsize=(13, height + 4.2))
    grid = figure.add_gridspec(2, len(JUDGED), height_ratios=(height, 4.2))
    for column, operation in enumerate(JUDGED):
        axis = figure.add_subplot(grid[0, column])
        _bars(axis, study.figures, operation, is_named=column == 0)
    for column, (name, scale, label) in enumerate(
        (("block_bytes", MiB, "MiB a transfer"), ("depth", 1, "transfers in flight"))
    ):
        _lines(figure.add_subplot(grid[1, column]), study, name, scale, label)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _bars(axis: Any, figures: StudyFigures, operation: Any, *, is_named: bool) -> None:
    found = list(reversed(figures.strategies()))
    rates = [figures.of(each, operation) or 0.0 for each in found]
    axis.barh(range(len(found)), rates, color=[_color(each) for each in found])
    axis.set_yticks(range(len(found)), [each.name for each in found] if is_named else [])
    axis.tick_params(labelsize=6)
    axis.set_ylim(-0.8, len(found) - 0.2)
    axis.set_title(f"{operation.value}, GB/s", loc="left", fontsize=10)


def _color(strategy: Strategy) -> str:
    if strategy.is_engine:
        return _OWN
    return _OTHER if isinstance(strategy, Alternative) else _BYTES


def _lines(axis: Any, study: Study, name: str, scale: int, label: str) -> None:
    others = {"mover", "copy_threads", "block_bytes", "depth"} - {name}
    same = [
        each
        for each in study.figures.engines()
        if all(getattr(each, other) == getattr(study.middle, other) for other in others)
    ]
    same.sort(key=lambda each: getattr(each, name))
    for operation, mark in zip(JUDGED, _MARKS, strict=True):
        points = [(getattr(s, name) / scale, study.figures.of(s, operation)) for s in same]
        axis.plot(*zip(*points, strict=True), marker=mark, label=operation.value)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(label, fontsize=9)
    axis.set_title("statehold, GB/s", loc="left", fontsize=10)
    axis.legend(fontsize=8)
