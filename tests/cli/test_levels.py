"""ls, verify and report look at every level of a run, and say what each copy is."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from cli.conftest import Asked
from statehold.checkpoint.levels.remembered import FILE_NAME
from statehold.cli import main
from statehold.errors import storage_error
from statehold.steps.objects import ObjectSteps
from support.faults import SMALL
from support.levels import save, settle

pytest.importorskip("obstore")

DATA = "rank-00000-of-00001.safetensors"


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A run at three levels: steps 2 and 3 at the first, 1 and 3 at the second, 3 in the store."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    levels = [
        statehold.Directory(keep=2),
        statehold.Directory(path=tmp_path / "far", name="far", every=1000),
        statehold.ObjectStore(f"file://{bucket}/llama", name="cloud", every=1000, keep=1),
    ]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, {"w": torch.full((1 << 18,), float(step)), "step": step})
            settle(ckpt)
    return tmp_path / "run"


def where(document: dict[str, Any]) -> dict[str, list[int]]:
    return {level["name"]: level["steps"] for level in document["levels"]}


EVERYWHERE = {"directory": [2, 3], "far": [1, 3], "cloud": [3]}


def test_ls_lists_all_levels_when_asked(many: Path, ask: Asked) -> None:
    code, found = ask("ls", many)
    assert code == 0
    assert "levels" not in found
    code, found = ask("ls", many, "--levels")
    assert code == 0
    assert where(found) == EVERYWHERE
    assert {level["state"] for level in found["levels"]} == {"there"}
    copies = [each for each in found["copies"] if each["step"] == 3]
    assert [each["level"] for each in copies] == ["directory", "far", "cloud"]
    assert len({each["bytes"] for each in copies}) == 1
    assert {each["files"] for each in copies} == {2}


def test_a_report_asks_an_object_store_only_when_told_to(many: Path, ask: Asked) -> None:
    code, found = ask("report", many)
    assert code == 0
    assert where(found) == {**EVERYWHERE, "cloud": []}
    assert [level["state"] for level in found["levels"]] == ["there", "there", "not asked"]
    code, found = ask("report", many, "--levels", "--verify")
    assert code == 0
    assert where(found) == EVERYWHERE
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]
    for step in found["steps"]:
        assert all(copy["integrity"]["intact"] for copy in step["copies"])


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["directory", "far", "cloud"])
def test_a_flipped_byte_is_found_at_any_level(level: str, many: Path, ask: Asked) -> None:
    roots = {"directory": many, "far": many.parent / "far", "cloud": many.parent / "bucket/llama"}
    (data,) = roots[level].glob(f"step-{3:012d}*/{DATA}")
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(bytes(raw))
    code, found = ask("verify", many, "--levels")
    assert code == 1
    assert [(each["level"], each["intact"]) for each in found["steps"]] == [
        (name, name != level) for name in EVERYWHERE
    ]
    code, found = ask("report", many, "--levels", "--verify")
    assert code == 1
    bad = [
        (step["step"], copy["level"])
        for step in found["steps"]
        for copy in step["copies"]
        if copy["state"] == "damaged"
    ]
    assert bad == [(3, level)]


def test_a_file_missing_in_the_store_is_seen_without_fetching(many: Path, ask: Asked) -> None:
    (data,) = (many.parent / "bucket/llama").glob(f"step-*/{DATA}")
    data.unlink()
    code, found = ask("ls", many, "--levels")
    assert code == 1
    assert [each["level"] for each in found["copies"] if each["state"] == "damaged"] == ["cloud"]


def test_a_level_that_is_away_hides_no_other(many: Path, ask: Asked) -> None:
    shutil.rmtree(many.parent / "far")
    shutil.rmtree(many.parent / "bucket")
    code, found = ask("ls", many, "--levels")
    assert code == 0
    assert [level["state"] for level in found["levels"]] == ["there", "not there", "not there"]
    assert not (many.parent / "bucket").exists()  # looking at a store makes none
    code, found = ask("verify", f"{many}@2", "--levels")
    assert (code, len(found["steps"])) == (0, 1)
    code, _ = ask("verify", f"{many}@1", "--levels")
    assert code == 3


def test_a_note_that_is_hostile_hides_no_step(
    many: Path, ask: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    (many / FILE_NAME).write_text('{"format": "\x1b[2J"}')
    code, found = ask("report", many)
    assert code == 0
    assert where(found) == {"directory": [2, 3]}
    code = main(["ls", str(many), "--levels"])
    assert code == 0
    said = capsys.readouterr()
    assert "cannot look at the other levels" in said.err
    assert "\x1b" not in said.err + said.out


def test_people_are_shown_the_levels_too(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(many), "--levels"]) == 0
    text = capsys.readouterr().out
    for word in ("LEVEL", "cloud", "objects", f"file://{many.parent}/bucket/llama", "far"):
        assert word in text
    assert main(["verify", str(many), "--levels"]) == 0
    assert "step 3 at level cloud: intact" in capsys.readouterr().out


def test_options_of_a_store_are_checked(many: Path, ask: Asked) -> None:
    code, _ = ask("ls", many, "--levels", "--option", "endpoint")
    assert code == 2
    code, found = ask("ls", many, "--levels", "--option", "secret_access_key=x")
    assert code == 4
    (cloud,) = [level for level in found["levels"] if level["name"] == "cloud"]
    assert cloud["state"] == "unreadable"
    assert "not an option" in cloud["error"]


def test_a_level_that_gives_no_answer_is_named_line_by_line(
    many: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(self: ObjectSteps) -> list[int]:
        raise storage_error("list", errno.ECONNREFUSED, "s3://bucket/\x1b[2Jrun")

    monkeypatch.setattr(ObjectSteps, "steps", refuse)
    page = tmp_path / "page.html"
    for command in (["ls"], ["verify"], ["report", "--output", page]):
        assert main([*map(str, command), str(many), "--levels"]) == 4
        out, err = capsys.readouterr()
        shown = page.read_text() if command[0] == "report" else out + err
        assert "ECONNREFUSED" in shown
        assert "cannot list\\n" not in shown
        assert "\x1b" not in shown
    (many / "step-000000000003" / DATA).unlink()
    assert main(["ls", str(many), "--levels"]) == 1  # damage that is known counts more
