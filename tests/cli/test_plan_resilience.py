"""statehold plan resilience: what it prints, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[..., tuple[int, Any]]
Say = Callable[..., tuple[int, str]]

JOB = ("plan", "resilience", "--replicas", "20", "--save-seconds", "30", "--steps", "200")


def test_policies_are_compared(ask: Ask, say: Say) -> None:
    pytest.importorskip("simpy")
    words = (*JOB, "--mtbf", "1800", "--repair-seconds", "7200")
    _, found = ask(*words)
    assert len(found["policies"]) == 5
    assert found["best"] in {"quota", "stacked", "exact", "restart"}
    code, text = say(*words)
    assert code == 0
    assert f"Use: {found['best']}" in text


def test_failures_come_from_a_file(ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("simpy")
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,replica,repair_s\n1000,3,500\n4000,7,500\n")
    _, found = ask(*JOB, "--trace", trace, "--policy", "exact")
    assert found["mtbf_s"] == 2000
    assert found["policies"][0]["lost_batches"] == 0


def test_a_plot_is_drawn(say: Say, tmp_path: Path) -> None:
    pytest.importorskip("simpy")
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    code, _ = say(*JOB, "--mtbf", "1800", "--policy", "exact", "--plot", path)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_simpy_is_asked_for(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    code, text = say(*JOB, "--mtbf", "1800")
    assert code == 2
    assert "SimPy" in text
    assert "pip install" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "either --mtbf or --trace"),
        (("--mtbf", "0"), "--mtbf is out of range"),
        (("--mtbf", "nan"), "--mtbf is out of range"),
        (("--mtbf", "9", "--step-seconds", "inf"), "--step-seconds is out of range"),
        (("--mtbf", "9", "--save-seconds", "1e300"), "--save-seconds is out of range"),
        (("--mtbf", "9", "--restart-seconds", "inf"), "--restart-seconds is out of range"),
        (("--mtbf", "9", "--repair-seconds", "nan"), "--repair-seconds is out of range"),
        (("--mtbf", "9", "--reduce-seconds", "nan"), "--reduce-seconds is out of range"),
        (("--mtbf", "9", "--steps", str(10**10)), "--steps is out of range"),
        (("--mtbf", "9", "--replicas", str(10**9)), "--replicas is out of range"),
        (("--mtbf", "9", "--shape", "0.001"), "--shape is out of range"),
        (("--mtbf", "0.00001"), "at most 50,000 failures"),
        (("--mtbf", "9", "--shape", "0"), "--shape is out of range"),
        (("--mtbf", "9", "--nodes", "0"), "--nodes is out of range"),
        (("--mtbf", "9", "--microbatches", "3"), "--microbatches is out of range"),
        (("--mtbf", "9", "--min-replicas", "21"), "--min-replicas is out of range"),
        (("--mtbf", "9", "--reduce-seconds", "60"), "--reduce-seconds is out of range"),
        (("--trace", "/nowhere"), "cannot be read"),
    ],
)
def test_bad_input_is_refused(say: Say, words: tuple[str, ...], told: str) -> None:
    code, text = say(*JOB, *words)
    assert code == 2
    assert told in text
