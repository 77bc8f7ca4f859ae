"""statehold plan offload: what it prints, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statehold.io import profile
from statehold.io.mounts import mount_of
from statehold.options.io import Moving
from statehold.units import MiB

Ask = Callable[..., tuple[int, Any]]
Say = Callable[..., tuple[int, str]]

WORK = ("plan", "offload", "--parameters", "7e9", "--memory", "64GiB")
TWO_PATHS = """\
7 billion parameters in bf16: 78.2 GiB of state, 13 GiB of gradients in host memory

PATH    READ  WRITE  BOTH  SUBGROUPS     STATE
/nvme0  6.50   4.00  2.48        422  52.8 GiB
/pfs    3.00   2.00  1.20        204  25.5 GiB
(GB/s)

An update takes 7.98 s. It is bounded by the paths: the paths need 7.97 s, the arithmetic 7 s.
Memory holds 65% of the state: 49.2 GiB as a tier and 1.75 GiB in transit. Storage moves 8.4 bytes \
for each parameter and step (DeepSpeed: 32).

Use: tiers=[Host("50392MiB"), Path("/nvme0"), Path("/pfs")], subgroup_bytes=134217728
"""


def test_two_paths(say: Say) -> None:
    code, text = say(*WORK, "--path", "/nvme0=6.5GB,4GB", "--path", "/pfs=3GB,2GB")
    assert (code, text) == (0, TWO_PATHS)


def test_the_rates_of_a_path_come_from_its_profile(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    moving = Moving(buffer_bytes=16 * MiB, queue_depth=32, backend="threads", copy_threads=2)
    rates = profile.StorageRates(write_bytes_per_s=2 * 10**9, read_bytes_per_s=3 * 10**9)
    saved = profile.Profile(mount_of(str(tmp_path)), moving, "today", (), rates)
    profile.save(saved, profile.path_for(str(tmp_path)))
    _, found = ask(*WORK, "--path", str(tmp_path))
    assert (found["paths"][0]["read"], found["paths"][0]["write"]) == (3e9, 2e9)


def test_a_device_takes_its_share(say: Say, ask: Ask) -> None:
    device = ("--rate", "2.2e9", "--device-rate", "2e10", "--device-link", "55GB")
    memory = ("plan", "offload", "--parameters", "7e9", "--memory", "100GiB")
    _, found = ask(*memory, *device)
    assert (found["period"]["length"], found["bound"]) == (2, "host and device")
    assert found["use"].startswith('tiers=[Host("')
    assert "Every 2. subgroup" in say(*memory, *device)[1]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--path", "/a=1GB"], "a path has two rates"),
        (["--path", "/a=0,1GB"], "a path has two rates"),
        (["--path", "/a=1GB,x"], "not a size in bytes"),
        (["--parameters", "many"], "--parameters is not a number"),
        (["--rate", "nan"], "--rate is not a number"),
        (["--device-link", "1GB"], "needs both"),
        (["--memory", "1GiB", "--path", "/a=1GB,1GB"], "too little host memory"),
        ([], "the state, which has no path"),
    ],
)
def test_what_cannot_be_planned_is_refused(say: Say, more: list[str], why: str) -> None:
    code, text = say(*WORK, *more)
    assert code == 2
    assert why in text


def test_a_path_without_a_profile_says_how_to_measure_it(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    code, text = say(*WORK, "--path", str(tmp_path))
    assert code == 2
    assert "statehold bench io TMP" in text
