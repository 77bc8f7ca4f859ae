"""Runs of one rank, of several with every layout, and the golden one; ways to run commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statehold.cli import main
from support.records import example
from support.runs import GOLDEN, arrays_of, write_step
from support.steps import true_sums


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 and 2 of one rank, which differ in `model.weight` and in a value."""
    path = tmp_path / "run"
    write_step(path, 1, arrays_of(), epoch=1, name="x")
    write_step(path, 2, arrays_of(2.0), epoch=2, name="x")
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Step 7 of four ranks, with a tensor of each kind of layout."""
    path = tmp_path / "shared"
    for name, content in example(true_sums).files.items():
        target = path / Path(name).relative_to("run")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return path


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "golden"
    shutil.copytree(GOLDEN, path)
    return path


Asked = Callable[..., tuple[int, Any]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Asked:
    """Run a command with --json: exit code and document."""

    def asked(*words: object) -> tuple[int, Any]:
        code = main([*map(str, words), "--json"])
        told = capsys.readouterr()
        return code, json.loads(told.out) if told.out else told.err

    return asked


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a command: exit code and text, with the test's directory as TMP."""

    def said(*words: object) -> tuple[int, str]:
        code = main([*map(str, words)])
        told = capsys.readouterr()
        return code, (told.out + told.err).replace(str(tmp_path), "TMP")

    return said
