"""Repository lint: limits on length, and words that must not stay behind."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
BANNED = ["TODO", "FIXME", "XXX", "PLACE" + "HOLDER"]
CODE = {".py", ".pyi", ".cpp", ".h", ".sh"}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    ours = [name for name in listed.stdout.splitlines() if "third_party" not in name]
    return [ROOT / name for name in ours if (ROOT / name).is_file()]


def test_files_are_short_and_narrow() -> None:
    problems = []
    for path in tracked():
        if path.suffix not in CODE:
            continue
        lines = path.read_text().splitlines()
        if len(lines) > FILE_LINES_MAX:
            problems.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
        problems += [
            f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
            for number, line in enumerate(lines, 1)
            if len(line) > COLUMNS_MAX
        ]
    assert not problems, "\n".join(problems)


def test_two_doors_lead_into_a_checkpointer() -> None:
    """No test calls or sets what is behind them: support/inside.py."""
    behind = re.compile(r"(?<!\bself)\._(opened\(\)|borrowed\b)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.is_relative_to(ROOT / "tests") and path.name != "inside.py"
        for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), 1)
        if behind.search(line)
    ]
    assert not found


def test_the_tests_draw_the_same_on_every_day() -> None:
    """Each source of chance has a seed, and only support/seeds.py says where it comes from."""
    unseeded = re.compile(
        r"\b(Random|default_rng)\(\)|STATEHOLD_SEED\"|\btime\(\) *(//|%)|\.today\(\)"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.is_relative_to(ROOT / "tests") and path.suffix == ".py" and path.name != "seeds.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unseeded.search(line) and path != Path(__file__)
    ]
    assert not found


def test_functions_are_short() -> None:
    problems = []
    for path in tracked():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    problems.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}")
    assert not problems, "\n".join(problems)


def test_every_source_file_opens_with_its_contract() -> None:
    problems = []
    for path in tracked():
        text = path.read_text() if path.suffix in CODE else ""
        if path.suffix == ".py" and text and not ast.get_docstring(ast.parse(text)):
            problems.append(str(path.relative_to(ROOT)))
        if path.suffix in {".cpp", ".h"} and not text.startswith("//"):
            problems.append(str(path.relative_to(ROOT)))
    assert not problems, "\n".join(problems)


def test_a_head_names_modules_that_are_there() -> None:
    """What is "Not here" is elsewhere: a word in brackets is a module, or the end of its path."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in tracked()]
    paths = [path for path in paths if path.parts[0] in {"src", "native", "docs"}]
    paths += [parent for path in paths for parent in path.parents]
    known = {"/".join(path.parts[at:]) for path in paths for at in range(len(path.parts))}
    problems = []
    for path in tracked():
        if path.suffix == ".py" and path.is_relative_to(ROOT / "src"):
            head = ast.get_docstring(ast.parse(path.read_text())) or ""
            elsewhere = re.search(r"^Not here: (.*?)(?:\n\n|\Z)", head, re.M | re.S)
            brackets = re.findall(r"\(([^()]*)\)", elsewhere[1] if elsewhere else "")
            words = [word for each in brackets for word in re.split(r",\s+", each)]
            names = [word for word in words if re.fullmatch(r"[a-z0-9_/]+", word)]
            problems += [f"{path.relative_to(ROOT)}: {n}" for n in names if n not in known]
    assert not problems, "\n".join(problems)


def test_nothing_was_left_behind() -> None:
    problems = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked()
        if path.suffix in CODE | {".md", ".toml"} and path != Path(__file__)
        for word in BANNED
        if re.search(rf"\b{word}\b", path.read_text())
    ]
    assert not problems, "\n".join(problems)


def test_digits_are_those_of_ascii() -> None:
    """In a text, the class of digits of `re` and int() also take those of other scripts."""
    found = [
        f"{path.name}:{at}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for at, line in enumerate(path.read_text().splitlines(), 1)
        if "\\d" in line or re.search(r"type=(int|float)\b", line)
    ]
    assert found == []
