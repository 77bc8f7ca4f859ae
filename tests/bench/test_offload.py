"""The benchmark of offloaded optimizers runs every group, and compares parameters with torch's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support import benches

torch = pytest.importorskip("torch")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from bench.offload.run import main

    def on_two_paths(groups: str) -> tuple[dict[str, list[dict]], str]:
        words = ["--only", groups, "--params", "1e6", "--updates", "2", "--rounds", "1"]
        one, other = tmp_path / "one=4GB", tmp_path / "other=2GB"
        with benches.forked_processes():
            assert main([str(one), str(other), *words, "--out", str(tmp_path / "out")]) == 0
        assert not list(tmp_path.rglob("*.state"))
        found = {
            group: json.loads((tmp_path / f"out/offload-{group}.json").read_text())
            for group in groups.split(",")
        }
        return found, capsys.readouterr().out

    return on_two_paths


@pytest.mark.thorough
def test_the_ideas_are_measured_and_the_bits_compared(run) -> None:
    found, text = run("host,ideas")
    assert [len(records) for records in found.values()] == [3, 5]
    moved, kept, *_ = found["ideas"]
    assert sum(moved["moved_bytes"]) > 1.2 * sum(kept["moved_bytes"])
    assert "all three" in text


@pytest.mark.skipif(os.environ.get("STATEHOLD_BENCH") != "all", reason="STATEHOLD_BENCH=all")
def test_the_other_groups_run(run) -> None:
    found, _ = run("paths,sharing,saving,saving-ranks")
    assert [len(records) for records in found.values()] == [3, 2, 4, 2]
    assert all(save["linked_bytes"] for save in found["saving-ranks"][0]["saves"])


@pytest.mark.thorough
def test_deepspeed_is_skipped_with_a_reason(run) -> None:
    found, text = run("peers")
    assert [record["name"] for record in found["peers"]] == [
        "statehold, path, no Host",
        "statehold, path, Host for the memory of their buffers",
        "statehold, Host",
    ]
    assert "skipped: DeepSpeed ZeRO-3, NVMe: no --deepspeed PYTHON" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_its_cases_are_skipped(run) -> None:
    found, text = run("device")
    assert found["device"] == []
    assert text.count("torch finds no device") == 7


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(1, 7))
def test_cases_on_a_device(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    from bench.offload import cases
    from bench.offload.on_device import run_on_device

    from statehold.offload import on_device
    from statehold.planners.interleaving import Device
    from support.cuda import install

    case = cases.device(cases.Setup(10**6, (), 0))[index]
    rates = (1e9, Device.full_duplex(6e9, 1e12))
    monkeypatch.setattr(on_device, "measure", lambda *_: rates)
    machine, ready = install(monkeypatch), []
    with machine.in_use():
        [record] = run_on_device(
            case, 0, 2, lambda: ready.append(1), machine.module, machine.finish
        )
    assert (record["name"], ready) == (case.name, [1])
    assert len(record["updates"]) == len(record["backward"]) == 2
    assert bool(record.get("device_subgroups")) is (case.device_every is not None)


def test_the_matrices_of_llama() -> None:
    from bench.offload.cases import llama_widths, numel_of

    widths = llama_widths(6_740_000_000)
    assert numel_of(widths) == 6_738_149_376
    assert len(widths) == 3 + 16 * 14
