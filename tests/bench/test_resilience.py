"""The benchmark of resilience runs, and compares gradients with those of DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import benches

torch = pytest.importorskip("torch")
from bench.resilience.killed.work import Order  # noqa: E402
from bench.resilience.processes import ended  # noqa: E402


@pytest.mark.skipif(os.environ.get("STATEHOLD_BENCH") != "all", reason="STATEHOLD_BENCH=all")
def test_sums_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.resilience import sums
    from bench.resilience.contestants import DDP, EXACT, NONE
    from bench.resilience.run import main

    monkeypatch.setattr(sums, "CONTESTANTS", (NONE, DDP, EXACT))
    monkeypatch.setattr(sums, "SHARES", (2,))
    words = [
        "--only",
        "sums",
        "--layers",
        "1",
        "--features",
        "64",
        "--rounds",
        "1",
        "--out",
        str(tmp_path),
    ]
    with benches.forked_processes():
        assert main(words) == 0
    records = json.loads((tmp_path / "resilience-sums.json").read_text())
    assert [record["of"] for record in records] == ["time"] * 2 + ["memory"] * 3
    assert all(len(record["step_s"]) == 1 for record in records[:2])
    announced = {record["name"]: record["announced_bytes"] / record["numel"] for record in records}
    assert announced[EXACT] > 8
    assert "exact, 2" in capsys.readouterr().out


@pytest.mark.skipif(os.environ.get("STATEHOLD_BENCH") != "all", reason="STATEHOLD_BENCH=all")
def test_a_transfer_to_a_joiner_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.resilience.run import main

    words = ["--only", "rejoin", "--state-mb", "20", "--step-s", "0.02", "--rounds", "1"]
    with benches.forked_processes():
        assert main([*words, "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "resilience-rejoin.json").read_text())
    assert [record["trainer"] for record in records] == ["waits", "computes"]
    assert all(len(record["turns"]) == 2 and record["bytes"] > 10**7 for record in records)
    assert "work, with/without" in capsys.readouterr().out


@pytest.mark.skipif(os.environ.get("STATEHOLD_BENCH") != "all", reason="STATEHOLD_BENCH=all")
def test_kills_are_measured_and_peers_that_are_not_here_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.resilience import kill
    from bench.resilience.run import main

    here = [each for each in kill.SUBJECTS if each.name != "torchrun, restart"]
    monkeypatch.setattr(kill, "SUBJECTS", here)
    monkeypatch.setattr(kill, "MODEL", (1, 16))
    words = ["--only", "kill", "--rounds", "1", "--peers", str(tmp_path / "nowhere")]
    with benches.forked_processes():
        assert main([*words, "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "resilience-kill.json").read_text())
    ours = [each for each in records if "skipped" not in each]
    assert [each["moment"] for each in ours] == ["early", "late"]
    assert all(each["thrown_away"] == 0 and each["batch"] == 32 for each in ours)
    shown = capsys.readouterr().out
    assert "--peers has no torchft" in shown
    assert "--peers has no mpi4py" in shown


def _order(**changes: object) -> Order:
    facts = {"folder": "", "replicas": 2, "microbatches": 4, "layers": 1, "features": 8,
             "until": 6, "kill": 4, "victim": 1, "moment": "late"}  # fmt: skip
    return Order(**{**facts, **changes})  # type: ignore[arg-type]


def _log(ends: dict[int, float], contributed: list[int], attempts: int = 1) -> list[dict[str, Any]]:
    """Commits at these times; the step 4 is computed so many times."""
    computed = [{"computes": [4, index]} for index in contributed * attempts]
    commits = [{"step": n, "contributed": contributed, "at": at} for n, at in ends.items()]
    return [*computed, *commits]


def test_a_discarded_step_counts_as_thrown_away_and_as_a_pause() -> None:
    from bench.resilience.kill import _facts

    survivor = _log({2: 2.0, 3: 3.0, 4: 9.5, 5: 10.5}, [0, 1], attempts=2)
    victim = _log({2: 2.0, 3: 3.0}, [2, 3])
    facts = _facts(_order(), [survivor, victim])
    assert (facts["pause_s"], facts["thrown_away"], facts["batch"]) == (5.5, 2, 2)


def test_a_job_that_hangs_is_counted_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bench.resilience import kill

    monkeypatch.setattr(kill, "DEADLINE_S", 0.1)
    waits = [sys.executable, "-c", "import signal; signal.pause()"]
    with ended([subprocess.Popen(waits, text=True)]) as jobs:
        assert not kill.have_ended(jobs)
    named = {"subject": "a peer", "moment": "late"}
    facts = {"pause_s": 1.5, "step_s": 0.5, "thrown_away": 3, "batch": 4, "microbatches": 4}
    hung = {**named, "victim": 0, "hangs": True}
    row = kill.table([{**named, **facts}, hung]).splitlines()[-1].split()
    assert (row[:4], row[4], row[-1]) == (["a", "peer", "late", "1"], "1.500", "1")
    assert "all 1 jobs hung" in kill.table([hung])


def test_a_sample_that_two_replicas_contribute_is_an_error() -> None:
    from bench.resilience.kill import _facts

    ends = {2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    with pytest.raises(RuntimeError, match="twice"):
        _facts(_order(), [_log(ends, [0, 1]), _log(ends, [1, 2])])


@pytest.mark.skipif(os.environ.get("STATEHOLD_BENCH") != "all", reason="STATEHOLD_BENCH=all")
def test_a_replica_that_comes_back_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.resilience.run import main

    words = ["--only", "come-back", "--state-mb", "20", "--step-s", "0.1", "--rounds", "1"]
    with benches.forked_processes():
        assert main([*words, "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "resilience-come-back.json").read_text())
    assert [record["trainer"] for record in records] == ["waits", "computes"]
    assert all(record["boundaries"] >= 2 and record["joining"] > 0 for record in records)
    assert "joining step" in capsys.readouterr().out


def test_boundaries_and_ratios_of_a_joiner_are_those_of_its_round() -> None:
    from bench.resilience.come_back import _facts

    ends = [0.0, 1.0, 2.0, 3.0, 4.5, 6.5, 7.0]  # it starts in step 4, and joins in step 5
    peer = [{"step": step, "at": at} for step, at in enumerate(ends)]
    joiner = [{"ready": 4.2}, {"step": 5, "share": []}, {"step": 6, "share": [1]}]
    found = {"undisturbed_from": 0, "started": 3.1, "log": joiner}
    facts = _facts([peer, peer], found)
    assert facts == {"boundaries": 2, "step_s": 1.0, "joining": 2.0, "starting": []}
    later = _facts([peer, peer], {**found, "started": 2.9})
    assert later["starting"] == [1.5]


def test_the_comparison_of_states_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.resilience.run import main

    words = ["--only", "alike", "--layers", "1", "--features", "64", "--rounds", "2"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    (record,) = json.loads((tmp_path / "resilience-alike.json").read_text())
    assert record["turns"] == 1
    assert len(record["share_s"]) == len(record["step_s"]) == 2
    assert "of the step" in capsys.readouterr().out
