"""A level that several hosts have: a part of a step is no damage, and what is here and wrong is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.conftest import Asked
from statehold import Directory
from statehold.checkpoint.levels.remembered import recall, remember
from statehold.cli import main

STEP = "step-000000000007"


@pytest.fixture
def host(shared: Path, tmp_path: Path) -> Path:
    """The run as one of several hosts sees it: ranks 0 and 1 of four, and a copy of rank 2."""
    run = tmp_path / "run"
    for name, ranks in (("disk", (0, 1)), ("disk-copies", (2,))):
        target = tmp_path / name / STEP
        target.mkdir(parents=True)
        for rank in ranks:
            for file in (shared / STEP).glob(f"rank-{rank:05d}-*"):
                shutil.copy(file, target)
        shutil.copy(shared / STEP / "manifest.json", target)
    disk = Directory(path=tmp_path / "disk", per_host=True, copies=1, name="local", keep=2)
    remember([disk, Directory()], str(run), ["local"])
    return run


def test_it_is_noted_which_levels_lie_on_several_hosts(host: Path) -> None:
    assert [(level.name, level.per_host, bool(level.host)) for level in recall(str(host))] == [
        ("local", True, True),
        ("directory", False, False),
    ]


def test_a_part_is_told_of_and_is_no_damage(
    host: Path, ask: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = ask("ls", host, "--levels")
    assert code == 0
    told = [(each["level"], each["state"], each["ranks_here"]) for each in found["copies"]]
    assert told == [("local", "part", 3), ("local.copies", "part", 3)]
    code, found = ask("verify", host, "--levels")
    assert code == 0
    assert [each["ranks_here"] for each in found["steps"]] == [2, 1]
    code, found = ask("report", host, "--verify")
    assert (code, found["steps"][0]["state"]) == (0, "part")
    assert main(["ls", str(host), "--levels"]) == 0
    assert "part (3 of 4 ranks here)" in capsys.readouterr().out


def test_with_the_copies_a_host_may_have_all(host: Path, shared: Path, ask: Asked) -> None:
    for file in (shared / STEP).glob("rank-00003-*"):
        shutil.copy(file, host.parent / "disk-copies" / STEP)
    _, found = ask("ls", host, "--levels")
    assert [each["state"] for each in found["copies"]] == ["committed", "committed"]


@pytest.mark.thorough
@pytest.mark.parametrize("ending", [".json", ".safetensors"])
@pytest.mark.parametrize(("folder", "rank"), [("disk", 1), ("disk-copies", 2)])
@pytest.mark.parametrize("lost", [True, False])
def test_what_is_here_and_wrong_is_damage(
    lost: bool, folder: str, rank: int, ending: str, host: Path, ask: Asked
) -> None:
    file = next((host.parent / folder / STEP).glob(f"rank-{rank:05d}-*{ending}"))
    if lost:
        file.unlink()
    else:
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    code, found = ask("verify", host, "--levels")
    assert code == 1
    assert [each["intact"] for each in found["steps"]] == [folder != "disk", folder == "disk"]
    code, found = ask("report", host, "--verify")
    assert (code, found["steps"][0]["state"]) == (1, "damaged")


def test_where_one_host_has_the_level_a_missing_rank_is_damage(host: Path, ask: Asked) -> None:
    remember([Directory(path=host.parent / "disk", name="local"), Directory()], str(host))
    code, _ = ask("verify", host, "--levels")
    assert code == 1
