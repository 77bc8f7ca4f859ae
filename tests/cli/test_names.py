"""What the name of a run or of a step means, and what is said of a name that means nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Say = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("command", ["verify", "show", "export"])
@pytest.mark.parametrize("step", ["nope", "-1", "1.5", "", "1" * 13])
def test_what_is_no_step_of_a_run(run: Path, say: Say, command: str, step: str) -> None:
    more = [run.parent / "out", "--to", "torch"] if command == "export" else []
    code, text = say(command, f"{run}@{step}", *more)
    assert code == 2
    assert "not the name of a step" in text
    assert f"got       {step or 'nothing'}" in text
    assert "newest" in text


def test_both_steps_of_a_diff_are_checked(run: Path, say: Say) -> None:
    for words in ((f"{run}@x", f"{run}@1"), (f"{run}@1", "@x")):
        code, text = say("diff", *words)
        assert code == 2
        assert "not the name of a step" in text


def test_a_step_that_is_not_there_is_another_matter(run: Path, say: Say) -> None:
    assert say("verify", f"{run}@7")[0] == 3
    assert say("verify", f"{run.parent / 'nowhere'}@nope")[0] == 3
    assert say("verify", f"{run}@newest")[0] == 0
    assert say("verify", f"{run}@002")[0] == 0


def test_a_run_that_is_not_there_names_what_is_near(run: Path, say: Say) -> None:
    code, text = say("ls", run.parent / "rum")
    assert code == 3
    assert "/run?" in text
    assert "did you mean" not in say("ls", run.parent / "nowhere" / "rum")[1]


def test_a_step_without_its_run_is_named(run: Path, say: Say) -> None:
    code, text = say("diff", "@1", f"{run}@2")
    assert code == 3
    assert "run  nothing" in text


def test_a_path_that_exists_is_never_cut(run: Path, say: Say) -> None:
    odd = run.rename(run.parent / "run@home")
    assert say("verify", odd)[0] == 0
    assert say("verify", f"{odd}@1")[0] == 0
    code, text = say("verify", f"{odd}@nope")
    assert code == 2
    assert "not the name of a step" in text


def test_a_rank_that_saved_nothing(run: Path, say: Say) -> None:
    code, text = say("show", run, "--rank", "7")
    assert code == 2
    assert "did not save the step\n  expected  0\n  got       7" in text


def test_a_file_that_cannot_be_written_has_the_name_that_was_asked_for(run: Path, say: Say) -> None:
    (run.parent / "page").mkdir()
    code, text = say("report", run, "-o", run.parent / "page")
    assert code == 2
    assert "cannot take a file\n  path      TMP/page\n" in text
    code, text = say("report", run, "-o", run.parent / ("x" * 250))
    assert code == 4
    assert text.rstrip() == f"statehold: TMP/{'x' * 250}: File name too long"


@pytest.mark.parametrize("words", ["ls", "du", "report --json", "prune --keep 1"])
def test_a_step_where_a_run_is_expected(run: Path, say: Say, words: str) -> None:
    command, *more = words.split()
    code, text = say(command, f"{run}@1", *more)
    assert code == 2
    assert "a run, not a step" in text


@pytest.mark.parametrize("command", ["tree", "doctor", "bench io", "ls", "du"])
def test_a_directory_that_is_not_there(tmp_path: Path, say: Say, command: str) -> None:
    code, text = say(*command.split(), tmp_path / "nowhere")
    assert code == 3
    assert "no such" in text


def test_a_file_that_is_not_there(run: Path, say: Say) -> None:
    code, text = say("report", run, "--json", "--trace", run / "none.json")
    assert code == 4
    assert text == "statehold: TMP/run/none.json: No such file or directory\n"


@pytest.mark.parametrize("folder", ["none", "a b/c"])
def test_a_page_in_a_directory_that_is_not_there(run: Path, say: Say, folder: str) -> None:
    code, text = say("report", run, "-o", run / folder / "x.html")
    assert code == 3
    assert f"got       TMP/run/{folder}\n" in text
    assert "mkdir -p" in text


RUN_COMMANDS = [
    "ls", "du", "report --json", "prune --keep 1", "verify --all", "verify --levels", "verify",
    "show", "diff RUN", "copy TMP/new", "fork TMP/new", "export TMP/new --to torch",
]  # fmt: skip


@pytest.mark.parametrize("words", RUN_COMMANDS)
def test_a_directory_of_other_things_is_no_run(tmp_path: Path, say: Say, words: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    command, *more = words.replace("TMP", str(tmp_path)).replace("RUN", str(tmp_path)).split()
    code, text = say(command, tmp_path, *more)
    assert code == 3
    assert "not a run" in text
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize(
    "sign", ["", ".lock", "levels.json", "run.json", "step-000000000001.partial"]
)
def test_a_run_that_has_no_step_yet(tmp_path: Path, say: Say, sign: str) -> None:
    run = tmp_path / "new"
    run.mkdir()
    if sign.endswith("partial"):
        (run / sign).mkdir()
    elif sign:
        (run / sign).touch()
        (run / "log.txt").touch()
    code, text = say("ls", run)
    assert code == 0
    assert "no committed step" in text
