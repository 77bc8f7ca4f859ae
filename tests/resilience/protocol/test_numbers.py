"""The numbered rules of docs/resilience.md: code and tests name each of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def named_in(folder: Path) -> set[int]:
    """A range, such as in "see Rn to Rm", names none."""
    texts = (path.read_text("utf-8") for path in folder.rglob("*.py"))
    ranges = re.compile(r"\bR\d+ to R\d+\b")
    return {int(each) for text in texts for each in re.findall(r"\bR(\d+)\b", ranges.sub("", text))}


def test_each_rule_is_named_where_it_is_kept_and_where_it_is_tested() -> None:
    document = ROOT.joinpath("docs/resilience.md").read_text("utf-8")
    numbers = {int(each) for each in re.findall(r"^- \*\*R(\d+)\*\*", document, re.MULTILINE)}
    assert numbers == set(range(1, 20))
    assert named_in(ROOT / "src/statehold/resilience") == numbers
    assert named_in(ROOT / "tests/resilience") == numbers
