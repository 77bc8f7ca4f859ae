"""Every benchmark runs in smoke mode, and every peer really restores what it saved.

The figures of a smoke run mean nothing; that they exist, are positive and belong to a save that was
restored bit for bit is what is tested here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import benches
from support.benches import ROOT

pytestmark = pytest.mark.thorough

for _needed in ("torch", "safetensors"):
    pytest.importorskip(_needed)


def _found(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench")
    benches.run("bench", "--smoke", "--out", out, "--in-process")
    return _found(out)


def _records(results: dict[str, Any], bench: str, peer: str) -> list[dict[str, Any]]:
    return [
        record
        for record in results["records"]
        if record["case"]["bench"] == bench and record["case"]["peer"] == peer
    ]


def _result(results: dict[str, Any], bench: str, peer: str) -> dict[str, Any]:
    (record,) = _records(results, bench, peer)
    if record["status"] == "unavailable":
        pytest.skip(record["reason"])
    result: dict[str, Any] = record["result"]
    assert result["difference"] is None
    return result


PEERS = (
    "statehold",
    "statehold-full",
    "statehold-default",
    "torch-save",
    "safetensors",
    "dcp-1",
    "dcp-2",
    "dcp-async",
    "dcp-async-cached",
    "dcp-process",
    "dcp-process-shm",
    "torchsnapshot",
    "torchsnapshot-async",
)
READERS = ("statehold", "torch-save", "safetensors", "dcp-2", "torchsnapshot")


@pytest.mark.parametrize("peer", PEERS)
def test_save_is_measured_and_restored(results: dict[str, Any], peer: str) -> None:
    result = _result(results, "save", peer)
    assert len(result["saves"]) == 3
    for save in result["saves"]:
        assert 0 < save["blocked_s"] <= save["durable_s"]
        if save["staged_s"] is not None:
            assert save["blocked_s"] <= save["staged_s"] <= save["durable_s"]
    assert result["files"] >= 1
    assert result["file_bytes"] >= result["bytes"]


@pytest.mark.parametrize("peer", PEERS)
def test_train_saves_while_the_state_changes(results: dict[str, Any], peer: str) -> None:
    result = _result(results, "train", peer)
    assert result["last_saved"] == len(result["steps"]) == 4
    assert result["wall_s"] > 0


@pytest.mark.parametrize("peer", READERS)
def test_restore_is_measured_cold_and_warm(results: dict[str, Any], peer: str) -> None:
    result = _result(results, "restore", peer)
    assert all(seconds > 0 for seconds in result["cold_s"] + result["warm_s"])
    assert (len(result["cold_s"]), len(result["warm_s"])) == (1, 2)


def test_the_limits_are_measured(results: dict[str, Any]) -> None:
    (record, *_) = _records(results, "limit", "")
    if record["status"] == "unavailable":
        pytest.skip(record["reason"])
    for rates in (*record["result"]["storage"].values(), record["result"]["copied"]):
        assert set(rates) == {"fresh", "overwrite", "read"}
        assert min(rates.values()) > 0
    assert record["result"]["work"] >= 1


def test_the_report_names_its_machine_and_its_denominators(results: dict[str, Any]) -> None:
    facts = results["facts"]
    assert {"cpu", "kernel", "filesystem", "commit", "versions", "page_cache"} <= set(facts)
    for row in results["summary"]["save"]:
        assert row["later_limit"] in ("fresh", "overwrite")
    bounds = [row for row in results["summary"]["train"] if row["peer"].startswith("bound")]
    assert all(row["every_1"]["median"] >= 1 for row in bounds)


def test_a_case_in_its_own_process_leaves_no_files(tmp_path: Path) -> None:
    from bench.run import main

    with benches.forked_processes():
        status = main(
            ["--smoke", "--out", str(tmp_path), "--only", "save", "--peers", "torch-save"]
        )
    assert status == 0
    assert _result(_found(tmp_path), "save", "torch-save")["files"] == 1
    assert not list((tmp_path / "data").iterdir())
    assert (tmp_path / "table.txt").read_text().count("torch-save") >= 1


def test_a_wrong_byte_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: one changed value, one missed step and one missed mark are all found."""
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.state import build

    state = build("smoke")
    state.fill(seed=5)
    step = state.step()
    assert state.difference(5, step) is None
    assert state.difference(6, step) is not None
    assert state.difference(5, step + 1) is not None
    victim = state.tensors()["optimizer.3.exp_avg"].view(-1)
    kept = victim[-1].item()
    victim[-1] += 1
    assert "optimizer.3.exp_avg" in str(state.difference(5, step))
    victim[-1] = kept
    victim[0] += 1
    assert "optimizer.3.exp_avg" in str(state.difference(5, step))


def test_planning_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.plan import main

    status = main(["--smoke", "--out", str(tmp_path)])
    assert status == 0
    whole = json.loads((tmp_path / "plan.json").read_text())
    assert {row["case"] for row in whole["rows"]} == {"llama-405b", "hybrid", "replicated"}
    for row in whole["rows"]:
        assert row["cold_s"] > 0
        assert row["cached_s"] > 0
        assert row["parts"] <= row["tensors"]
    assert (tmp_path / "plan.txt").read_text().count("hybrid") == 4


def test_what_a_save_costs_the_host_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.host import main

    threads = torch.get_num_threads()
    main(["--tensors", "40", "--saves", "3"])
    torch.set_num_threads(threads)
    *_, on_host, on_device = capsys.readouterr().out.splitlines()
    assert on_host.split()[:2] == ["804", "host"]
    assert on_device.split()[:2] == ["40", "device"]
    assert all(float(each) > 0 for each in [*on_host.split()[2:6], *on_device.split()[2:]])
    assert len(on_device.split()) == 12


def test_each_protection_can_still_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statements that bench.protections replaces are where it looks for them."""
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.protections import ORIGINAL, VARIANTS

    for name, replacements in VARIANTS.items():
        assert bool(replacements) is (name != ORIGINAL)
        for index, replacement in enumerate(replacements):
            copy = tmp_path / f"{name} {index}" / replacement.path
            copy.parent.mkdir(parents=True)
            copy.write_text((ROOT / replacement.path).read_text())
            replacement.apply(tmp_path / f"{name} {index}")
            assert replacement.new in copy.read_text()
            with pytest.raises(RuntimeError, match="does not have once"):
                replacement.apply(tmp_path / f"{name} {index}")
