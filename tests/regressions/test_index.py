"""Every test that README.md names as the guard of a defect is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = [
    line
    for line in Path(__file__).with_name("README.md").read_text().splitlines()
    if line.startswith("| ") and "guarded by" not in line
]


def functions(path: Path) -> set[str]:
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip())
def test_a_defect_has_a_guard(line: str) -> None:
    guards = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)
    assert guards
    for path, name in guards:
        assert name in functions(ROOT / path)


def test_a_defect_stands_there_once() -> None:
    defects = [line.split("|")[1] for line in LINES]
    assert len(set(defects)) == len(defects) > 20
