"""The table: gpu.md to read and gpu.json to compare, written again after every check.

Invariants: each check of the run is in the table from the beginning, those that did not run yet as
"not run"; a reader never sees half a file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from bench.gpu.figures import FAILED, MISSED, REACHED, SKIPPED, WAITING, Figure, waiting

__all__ = ["Report"]

TITLE = "The first ten minutes on a device"
HEADINGS = ("check", "figure", "value", "unit", "expected", "verdict")


class Report:
    """What a run has found so far."""

    def __init__(
        self, out: Path, facts: dict[str, Any], names: list[str], title: str = TITLE
    ) -> None:
        self._out, self._title = out, title
        self._facts = facts
        self._found = {name: [waiting(name)] for name in names}
        self._seconds: dict[str, float] = {}
        self.write()

    def add(self, check: str, found: list[Figure], seconds: float) -> None:
        """What a check has found; the files are written."""
        self._found[check] = found
        self._seconds[check] = round(seconds, 1)
        self.write()

    @property
    def counts(self) -> Counter[str]:
        """Figures by verdict."""
        return Counter(each.verdict for found in self._found.values() for each in found)

    def write(self) -> None:
        whole = {
            "schema": 1,
            "facts": self._facts,
            "counts": dict(self.counts),
            "seconds": self._seconds,
            "checks": {
                name: [dataclasses.asdict(each) for each in found]
                for name, found in self._found.items()
            },
        }
        _replace(self._out / "gpu.json", json.dumps(whole, indent=1) + "\n")
        _replace(self._out / "gpu.md", self._text())

    def _text(self) -> str:
        order = (REACHED, MISSED, FAILED, SKIPPED, WAITING)
        told = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in order)
        lines = [f"# {self._title}", "", f"{told}.", ""]
        lines += [f"- {key}: {value}" for key, value in self._facts.items()]
        lines += ["", _line(HEADINGS), _line(["---"] * len(HEADINGS))]
        lines += [
            _line(_cells(name, each)) for name, found in self._found.items() for each in found
        ]
        return "\n".join(lines) + "\n"


def _cells(check: str, figure: Figure) -> list[str]:
    value = figure.reason if figure.value is None else _number(figure.value)
    verdict = figure.verdict.upper() if figure.verdict in (MISSED, FAILED) else figure.verdict
    return [check, figure.name, value, figure.unit, figure.expected, verdict]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _line(cells: Any) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    os.replace(partial, path)
