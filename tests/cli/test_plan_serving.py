"""statehold plan serving: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.serving import CONFIGS

from statehold.io import profile
from statehold.io.mounts import mount_of
from statehold.options.io import Moving
from statehold.units import MiB

Ask = Callable[..., tuple[int, Any]]
Say = Callable[..., tuple[int, str]]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["Qwen2.5-32B"]))
    given = ["--config", str(config), "--gpu", "h200", "--gpus", "8", "--requests", "64"]
    return ["plan", "serving", *given]


def test_a_plan_in_words(say: Say, words: list[str]) -> None:
    code, text = say(*words, "--layout", "4x2x1", "--layout", "8x1x1", "--store", "/nvme=200GB")
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == (
        "32.8 billion parameters (32.0 for a token), 61 GiB of weights, 256 KiB of KV a token"
    )
    assert lines[2].split()[:4] == ["LAYOUT", "TOKENS", "CAP", "BOUND"]
    assert any(line.startswith("DP 4 x TP 2  2,872,840  ") for line in lines)
    assert "END IF PAGES SURVIVE" in text
    assert lines[-1].startswith("Use: DP 4 x TP 2. A store that reads ")


def test_the_document(ask: Ask, words: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt,answer\n0,100,200\n0.5,100,100\n")
    code, found = ask(*words, "--trace", str(trace), "--layout", "1x8x1", "--concurrency", "2")
    assert code == 0
    assert (found["kv_bytes_per_token"], found["use"]) == (262144, "TP 8")
    assert found["load_bytes_per_s"] is None
    (layout,) = found["layouts"]
    (swept,) = layout["swept"]
    assert (swept["concurrency"], swept["recompute"]["answered"]) == (2, 300)
    assert layout["step_s"].keys() == {"arithmetic", "reads", "link", "host"}


def test_the_bandwidth_of_a_store_comes_from_the_profile_of_its_storage(
    ask: Ask, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    moving = Moving(buffer_bytes=16 * MiB, queue_depth=32, backend="threads", copy_threads=2)
    rates = profile.StorageRates(write_bytes_per_s=2 * 10**9, read_bytes_per_s=3 * 10**9)
    saved = profile.Profile(mount_of(str(tmp_path)), moving, "today", (), rates)
    profile.save(saved, profile.path_for(str(tmp_path)))
    assert ask(*words, "--store", str(tmp_path))[1]["load_bytes_per_s"] == 3e9


def test_a_device_by_its_data_sheet(ask: Ask, words: list[str]) -> None:
    sheet = "memory=141GB,flops=989e12,bandwidth=4.8TB,link=450GB"
    one = [*words, "--layout", "4x2x1"]
    named, told = ask(*one), ask(*one, "--gpu", sheet)
    assert named == told
    assert ask(*one, "--gpu", "h200,memory=80GB")[1]["layouts"][0]["tokens"] < 1_300_000


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--gpu", "h300"], "--gpu is out of range"),
        (["--gpu", "memory=80GB"], "memory=141GB,flops=989e12"),
        (["--gpu", "h200,flops=fast"], "not a size in bytes"),
        (["--gpus", "0"], "a number from 1 to 4,096"),
        (["--requests", "0"], "--requests is out of range"),
        (["--utilization", "nan"], "--utilization is out of range"),
        (["--rate", "0"], "--rate is out of range"),
        (["--concurrency", "0"], "--concurrency is out of range"),
        (["--layout", "8"], "DPxTPxPP with a product of 8"),
        (["--layout", "4x4x1"], "DPxTPxPP with a product of 8"),
        (["--store", "/nowhere"], "the bandwidth of the store is not known"),
        (["--store", "/nowhere=0"], "the bandwidth of the store is not known"),
        (["--trace", "/nowhere.csv"], "the trace cannot be read"),
        (["--kv-dtype", "int3"], "the type of the values is not known"),
        (["--config", "/nowhere"], "the configuration of the model cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    say: Say, words: list[str], more: list[str], why: str
) -> None:
    code, text = say(*words, *more)
    assert code == 2
    assert why in text
