"""What a step says of itself, for people and for --json: its metrics and tags.

Not here: what save() accepts (checkpoint/save/call), where it is written (format/about).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from statehold.cli.output import plain
from statehold.format.about import About


def said(about: About) -> dict[str, Any]:
    """The members `metrics` and `tags` of a step in the output of --json."""
    return {"metrics": dict(about.metrics), "tags": list(about.tags)}


def in_words(metrics: Mapping[str, float], tags: Sequence[str]) -> str:
    """ "val_loss=2.1 #before-lr-drop"; nothing for a step that says nothing."""
    numbers = [f"{plain(name)}={value:g}" for name, value in metrics.items()]
    return " ".join([*numbers, *(f"#{plain(tag)}" for tag in tags)])


METRICS_SHOWN = 8  # as columns; --json and `show` have all
LEAST, MOST = "*", "^"
LEGEND = f"{LEAST} the least of its column, {MOST} the greatest"
_ENOUGH = 3  # steps, for a least and a greatest to mean something

Cell = Callable[[Mapping[str, Any]], str]


def metrics_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[tuple[int, float]]]:
    """By metric, the steps that have it, in the order in which the metrics first occur."""
    names = dict.fromkeys(name for step in steps for name in step.get("metrics", ()))
    return {
        name: [(step["step"], step["metrics"][name]) for step in steps
               if name in step.get("metrics", ())]
        for name in names
    }  # fmt: skip


def columns_of(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, Cell]]:
    """A column for each metric and one for tags, with the cell of a step; none without any."""
    found: list[tuple[str, Cell]] = [
        (plain(name), _cell_of(name, [value for _, value in points]))
        for name, points in list(metrics_of(steps).items())[:METRICS_SHOWN]
    ]
    if any(step.get("tags") for step in steps):
        found.append(("tags", _tags))
    return found


def _tags(step: Mapping[str, Any]) -> str:
    return " ".join(f"#{plain(tag)}" for tag in step.get("tags", ()))


def _cell_of(name: str, values: Sequence[float]) -> Cell:
    known = [value for value in values if isfinite(value)]
    marks = {max(known): MOST, min(known): LEAST} if len(set(known)) >= _ENOUGH else {}

    def cell(step: Mapping[str, Any]) -> str:
        value = step.get("metrics", {}).get(name)
        return "-" if value is None else f"{value:g}{marks.get(value, '')}"

    return cell
