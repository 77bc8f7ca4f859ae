"""The benchmarks of several ranks run in smoke mode, and what they saved is restored bit for bit.

Every day two libraries and two pairs of layouts; with STATEHOLD_BENCH=all every one. The figures of
a smoke run mean nothing; that they exist and belong to verified saves is tested.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from support import benches
from support.benches import ROOT

pytestmark = pytest.mark.thorough

ALL = os.environ.get("STATEHOLD_BENCH") == "all"
PEERS = {"statehold", "dcp-2"}
PAIRS = {("fsdp-4", "fsdp-4"), ("fsdp-4", "fsdp-2")}
if ALL:
    PEERS |= {"statehold-independent", "statehold-alone"}
    PAIRS |= {("fsdp-4", each) for each in ("fsdp-3", "whole", "tp-4", "columns-4")}
    PAIRS |= {("tp-2-fsdp-2", "fsdp-4"), ("whole", "fsdp-4")}

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ranks")
    words = []
    if not ALL:
        words = ["--peers", ",".join(PEERS), "--pairs", ",".join(map(":".join, PAIRS))]
    benches.run("bench.ranks", "--smoke", "--out", out, *words)
    assert not list((out / "data").iterdir())
    assert str(out) not in (out / "results.json").read_text() + (out / "table.txt").read_text()
    whole: dict[str, Any] = json.loads((out / "results.json").read_text())
    return whole


def test_saves_of_all_ranks_are_measured(results: dict[str, Any]) -> None:
    rows = {row["peer"]: row for row in results["summary"]["save"]}
    assert set(rows) >= PEERS
    for row in rows.values():
        assert 0 < row["blocked_each_s"]["median"] <= row["blocked_s"]["max"]
        assert row["blocked_s"]["median"] <= row["durable_s"]["median"]
    assert {"capture", "plan", "start_write"} <= set(rows["statehold"]["parts_s"])
    assert rows["statehold"]["bytes"] == rows["dcp-2"]["bytes"] == rows["statehold"]["bytes"]


def test_training_is_compared_with_the_loop_without_saves(results: dict[str, Any]) -> None:
    ratios = {row["peer"]: row["ratio"]["median"] for row in results["summary"]["train"]}
    assert ratios["none"] == 1
    assert {"statehold", "dcp-2"} <= set(ratios)


def test_the_layouts_are_restored_by_both_libraries(results: dict[str, Any]) -> None:
    rows = results["summary"]["restore"]
    found = {(row["peer"], row["source"], row["target"]) for row in rows}
    for peer in ("statehold", "dcp-2"):
        assert found >= {(peer, *pair) for pair in PAIRS}
    for row in rows:
        assert row["cold_of_same"] > 0
        assert row["peer"] != "statehold" or row["read_of_needed"] >= 1


def test_the_content_of_a_part_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: a wrong byte, step or seed is found, in a state that is not split."""
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.ranks.state import RankState

    state = RankState("smoke", "whole")
    state.fill(seed=5)
    step = state.step()
    assert state.difference(5, step) is None
    assert state.difference(6, step) is not None
    assert state.difference(5, step + 1) is not None
    victim = state.tensors()["optimizer.norm.exp_avg"]
    victim.view(-1)[-1] += 1
    assert "optimizer.norm.exp_avg" in str(state.difference(5, step))
