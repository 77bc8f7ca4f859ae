"""The documents tell the truth: links lead somewhere, commands exist. Their code: test_blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(path: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"`make ([a-z-]+)|^    make ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert {first or second for first, second in used} <= known


def test_every_row_about_failures_names_tests_that_are_there() -> None:
    rows = [
        line for line in (ROOT / "docs/failures.md").read_text().splitlines() if "`tests/" in line
    ]
    assert len(rows) > 30
    for row in rows:
        file = ""
        for name in re.findall(r"`((?:tests/[\w/]+(?:\.py)?)?(?:::\w+)?)`", row):
            path, _, test = name.partition("::")
            file = path or file
            assert (ROOT / file).exists(), row
            if test:
                assert f"def {test}(" in (ROOT / file).read_text(), name


def test_the_architecture_names_modules_that_are_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"([\w/]+\.(?:py|cpp|h))\b", text))
    found = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("src/**/*.py")]
    found += [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("native/*")]
    found += [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("tests/**/*.py")]
    assert len(named) > 100
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in found)]
